"""`fedfactor plan`: which methods fit which devices, at what rank or width, and what they cost there.

There are no formulas per method. The method's own hooks build the network that a client would train, without values.
Its operations and its training memory are counted, and bytes are the length of encoded messages. Metrics are not
predicted: use `fedfactor compare` to measure them.
"""

from fedfactor.advise.describe import as_dict, render, sentence, to_recipe
from fedfactor.advise.devices import Device, PlanError, link
from fedfactor.advise.fitting import Advice, DevicePlan, Fit, advise
from fedfactor.advise.gauge import Gauge, Size
from fedfactor.advise.privacy import NoisePlan, PrivacyPlan, check_guarantee, plan_privacy, render_privacy
from fedfactor.advise.request import Request, request_of

__all__ = [
    "Advice", "Device", "DevicePlan", "Fit", "Gauge", "NoisePlan", "PlanError", "PrivacyPlan", "Request", "Size",
    "advise", "as_dict",
    "check_guarantee", "link", "plan_privacy", "render", "render_privacy", "request_of", "sentence", "to_recipe",
]  # fmt: skip
