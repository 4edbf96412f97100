"""`mode=calibrate`: what the devices of this machine really do, written as a profile and a cluster file."""

from __future__ import annotations

from whale_trainer.calibration.paces import measure_paces as measure_paces
from whale_trainer.calibration.run import CLUSTER as CLUSTER
from whale_trainer.calibration.run import PROFILE as PROFILE
from whale_trainer.calibration.run import Calibration as Calibration
from whale_trainer.calibration.run import calibrate as calibrate
from whale_trainer.calibration.show import calibration_table as calibration_table
