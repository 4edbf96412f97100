"""python train.py [group=option ...] [key=value ...]: see README.md, or --help for the groups."""

from whale_trainer.cli import main

if __name__ == "__main__":
    main()
