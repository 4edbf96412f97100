"""Our prediction beside what Whale's paper measured of the same experiment."""

from __future__ import annotations

from whale_trainer.config.sections import PaperConfig
from whale_trainer.planning.plan import Prediction


def paper_line(predicted: Prediction, paper: PaperConfig) -> str:
    """`gain over even 1.34, the paper measured 1.30 (figure 17)`; the paper's alone where there is no prediction."""
    measured = f"measured {paper.gain_over_even:.2f} (figure {paper.figure})"
    if predicted.step_s is None or predicted.even_step_s is None:
        return f"gain over even not predicted, the paper {measured}"
    return f"gain over even {predicted.even_step_s / predicted.step_s:.2f}, the paper {measured}"
