"""Models of other libraries on amxq: transformers' models, generation."""

from amxq.integrations.layers import Int4Linear as Int4Linear
from amxq.integrations.loader import load_model as load_model
from amxq.integrations.summary import LoadSummary as LoadSummary
