"""`LLAISYS_TEST_PRESSURE` (`make attack-nightly`): sizes and repetitions that take long."""

import os

NIGHTLY = "LLAISYS_TEST_PRESSURE" in os.environ
