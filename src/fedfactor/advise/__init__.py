"""Which methods fit which devices, at what rank or width, and what they cost there: `fedfactor plan`.

Nothing is estimated by a formula a method. The network that a client would train is built through the method's own
hooks (without numbers), its operations and what training keeps are counted, and the bytes are the length of messages
that are really encoded. Whether a model will be accurate is not asked here: `fedfactor compare` finds out.
"""

from fedfactor.advise.devices import Device, PlanError, link
from fedfactor.advise.fitting import Fit, Plan, Row, plan
from fedfactor.advise.gauge import Gauge, Size
from fedfactor.advise.request import Request, request_of
from fedfactor.advise.telling import as_dict, render, sentence, to_recipe

__all__ = [
    "Device", "Fit", "Gauge", "Plan", "PlanError", "Request", "Row", "Size", "as_dict", "link", "plan", "render",
    "request_of", "sentence", "to_recipe",
]  # fmt: skip
