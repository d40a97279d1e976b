"""An exported agent as one GGUF file with an Ollama Modelfile beside it.

A GGUF file names its tensors otherwise than transformers does, keeps the rows of Llama's query and key weights in
another order, and adds one to Gemma's norms. Everything else is copied.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hacrl_core.errors import ConfigError

# transformers' family → GGUF's.
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
TYPES = ("f32", "f16")
# Stands for a user's message while the template is rendered.
_MESSAGE = "\x01"
_NORMAL, _CONTROL, _BYTE = 1, 3, 6


def write_gguf(folder: Path, file: Path, kind: str = "f32", name: str = "") -> Path:
    """Write the checkpoint in ``folder`` as a GGUF file; raise ConfigError for a family that has no such file."""
    gguf = _library()
    if kind not in TYPES:
        raise ConfigError(f"--gguf-type {kind!r}: choose one of {', '.join(TYPES)}")
    config = json.loads((folder / "config.json").read_text())
    family = config.get("model_type", "")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"--gguf: {family or 'this model'} is not written as GGUF; only {known} are")
    _check_fixed(config, family)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == FAMILIES[family])
    writer = gguf.GGUFWriter(str(file), FAMILIES[family])
    _settings(writer, config, name or folder.name, kind, gguf)
    _tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for tensor, weight in _weights(folder):
        if tensor == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        target = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ConfigError(f"--gguf: tensor {tensor} of {family} has no name in GGUF; export it without --gguf")
        made = _converted(tensor, weight, config, family)
        writer.add_tensor(target, made.astype(np.float16) if kind == "f16" and made.ndim > 1 else made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_modelfile(folder: Path, gguf_file: str, temperature: float) -> Path:
    """Write Ollama's Modelfile: the file, the prompt's format for one turn, the end tokens, the temperature."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text = _rendered(tokenizer)
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        text = text.removeprefix(tokenizer.bos_token)  # llama.cpp adds it
    before, _, after = text.partition(_MESSAGE)
    ends = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id") or []
    stops = tokenizer.convert_ids_to_tokens(ends if isinstance(ends, list) else [ends])
    lines = [
        f"FROM ./{gguf_file}",
        f'TEMPLATE """{before}{{{{ .Prompt }}}}{after}"""',
        *(f'PARAMETER stop "{stop}"' for stop in stops),
        f"PARAMETER temperature {temperature:g}",
    ]
    path = folder / "Modelfile"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError("--gguf needs the package gguf; install the extra hacrl[real]") from None
    return gguf


def _check_fixed(config: dict[str, Any], family: str) -> None:
    """Raise ConfigError for a Gemma that differs in what readers of GGUF take for granted: its layers."""
    if not family.startswith("gemma3"):
        return
    layers = config.get("layer_types") or []
    expected = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(len(layers))]
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta", 10000.0)
    if layers != expected or config.get("query_pre_attn_scalar") != config.get("head_dim") or local != 10000.0:
        raise ConfigError("--gguf: this Gemma's layers are not those of a published one; export it without --gguf")


def _settings(writer: Any, config: dict[str, Any], name: str, kind: str, gguf: Any) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    plain = rope.get("full_attention", rope)
    if plain.get("rope_type", "default") not in ("default", "linear"):
        raise ConfigError(f"--gguf: rope scaling {plain['rope_type']} is not written; export it without --gguf")
    writer.add_rope_freq_base(float(plain.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_rope_dimension_count(size)
    if plain.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(plain["factor"]))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Write the vocabulary: a byte-level BPE as it is, a BPE with byte fallback with its merges as scores."""
    from transformers import AutoTokenizer

    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = raw["model"]
    if model.get("type") != "BPE":
        raise ConfigError(f"--gguf: a {model.get('type')} tokenizer is not written; export it without --gguf")
    fallback = bool(model.get("byte_fallback"))
    vocabulary = {**model["vocab"], **{each["content"]: each["id"] for each in raw["added_tokens"]}}
    special = {each["id"] for each in raw["added_tokens"] if each["special"]}
    size = max(config["vocab_size"], max(vocabulary.values()) + 1)
    tokens = [f"[unused{index}]" for index in range(size)]
    for token, index in vocabulary.items():
        tokens[index] = token
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    is_byte = {index for index, token in enumerate(tokens) if fallback and len(token) == 6 and token.startswith("<0x")}
    kinds = [_CONTROL if i in special else _BYTE if i in is_byte else _NORMAL for i in range(size)]
    writer.add_tokenizer_model("llama" if fallback else "gpt2")
    writer.add_tokenizer_pre("qwen2" if config["model_type"].startswith("qwen") else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if fallback:
        rank = {"".join(pair.split(" ", 1)): -float(place) for place, pair in enumerate(merges)}
        writer.add_token_scores([rank.get(token, -1e6) for token in tokens])
    else:
        writer.add_token_merges(merges)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for name in ("bos", "eos", "pad", "unk"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(int(index))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    begins = bool(tokenizer.bos_token) and _rendered(tokenizer).startswith(tokenizer.bos_token)
    writer.add_add_bos_token(begins)


def _rendered(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        return _MESSAGE
    messages = [{"role": "user", "content": _MESSAGE}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _weights(folder: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield the checkpoint's tensors in float32, one after the other."""
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name).to(torch.float32).numpy()


def _converted(name: str, weight: Any, config: dict[str, Any], family: str) -> npt.NDArray[np.float32]:
    if family.startswith("gemma3") and name.endswith("norm.weight"):
        return np.asarray(weight + 1.0, dtype=np.float32)
    if FAMILIES[family] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads"]
        rows = heads if "q_proj" in name else config.get("num_key_value_heads") or heads
        halves = weight.reshape(rows, 2, weight.shape[0] // rows // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return np.asarray(weight, dtype=np.float32)
