"""Hugging Face: importing this registers `attn_implementation="shaped"` and the Auto classes. Needs the extra `hf`."""

from shaped.process import suggest_install

try:
    import transformers as transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"shaped.hf needs transformers: {suggest_install('hf')}") from error

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from shaped.hf.callbacks import DiagnosticsCallback as DiagnosticsCallback
from shaped.hf.callbacks import ShapingCallback as ShapingCallback
from shaped.hf.configuration import ShapedConfig as ShapedConfig
from shaped.hf.extensions import extend_transformers
from shaped.hf.heads import ShapedForQuestionAnswering as ShapedForQuestionAnswering
from shaped.hf.heads import ShapedForSequenceClassification as ShapedForSequenceClassification
from shaped.hf.heads import ShapedForTokenClassification as ShapedForTokenClassification
from shaped.hf.models import ShapedForCausalLM as ShapedForCausalLM
from shaped.hf.models import ShapedForMaskedLM as ShapedForMaskedLM
from shaped.hf.models import ShapedModel as ShapedModel
from shaped.hf.prediction import Prediction as Prediction
from shaped.hf.prediction import predict as predict
from shaped.hf.shaping import shape as shape
from shaped.hf.shaping import vanilla as vanilla
from shaped.nn.blocks import parameter_groups as parameter_groups

extend_transformers()
AutoConfig.register(ShapedConfig.model_type, ShapedConfig, exist_ok=True)
AutoModel.register(ShapedConfig, ShapedModel, exist_ok=True)
AutoModelForMaskedLM.register(ShapedConfig, ShapedForMaskedLM, exist_ok=True)
AutoModelForCausalLM.register(ShapedConfig, ShapedForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ShapedConfig, ShapedForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(ShapedConfig, ShapedForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(ShapedConfig, ShapedForQuestionAnswering, exist_ok=True)
