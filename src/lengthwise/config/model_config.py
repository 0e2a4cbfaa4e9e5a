"""The settings of ``model``: a preset with sizes of one's own, or a folder of Hugging Face."""

from pydantic import Field, ValidationInfo, field_validator

from lengthwise.config.choices import Implementation
from lengthwise.config.contradictions import ONE_OF_THEM, contradiction
from lengthwise.config.limits import ModelSize
from lengthwise.config.shared_settings import Settings
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.specs import model_preset

DEFAULT_PRESET = "llama-tiny"
SIZES = ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "max_positions")
"""Settings of a model that replace the sizes of its preset."""
NOT_OF_A_FOLDER = "is for presets; a model of model.hf is as its config.json says"


class ModelConfig(Settings):
    """Which model is trained."""

    preset: str = DEFAULT_PRESET
    """A model preset; `lengthwise config --presets` lists them."""
    hf: str = ""
    """Instead of preset: a folder with Hugging Face config.json and safetensors to start from."""
    implementation: Implementation = "auto"
    """Whose code computes the model of hf. lengthwise: this library's own, for Llama, Qwen2, GPT-2 and BERT, with every
    parallel method, pipelines and compiled layers. transformers: the model's own class, any that lengthwise.prepare
    takes, by methods on whole weights, in pipelines too. auto: lengthwise where it has the model, else transformers."""
    vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)
    """The number of token ids that the preset embeds; none: as many as the index needs."""
    num_layers: ModelSize | None = None
    """The preset's number of layers instead of its own; none: its own. The same for the sizes that follow."""
    hidden_size: ModelSize | None = None
    """The width of the preset's hidden states."""
    ffn_size: ModelSize | None = None
    """The width of the preset's feed-forward."""
    num_heads: ModelSize | None = None
    """The preset's number of attention heads, each as wide as divides hidden_size evenly."""
    num_kv_heads: ModelSize | None = None
    """The preset's number of key and value heads; none: its own, or num_heads where that is set."""
    max_positions: ModelSize | None = None
    """The preset's number of learned positions, if it has any (gpt, bert)."""

    @field_validator("preset")
    @classmethod
    def _check_preset(cls, name: str) -> str:
        try:
            model_preset(name)
        except InputError as error:
            raise contradiction(str(error)) from None
        return name

    @field_validator("hf")
    @classmethod
    def _check_one_model(cls, folder: str, info: ValidationInfo) -> str:
        preset = info.data.get("preset", DEFAULT_PRESET)
        if folder and preset != DEFAULT_PRESET:
            raise contradiction(f"model.preset={preset} and model.hf={brief(folder)} are two models; {ONE_OF_THEM}")
        return folder

    @field_validator(*SIZES)
    @classmethod
    def _check_of_preset(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("hf"):
            raise contradiction(f"model.{info.field_name}={value} {NOT_OF_A_FOLDER}")
        return value

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that replace those of the preset, by their names in ModelSpec."""
        return {name: value for name in SIZES if (value := getattr(self, name)) is not None}
