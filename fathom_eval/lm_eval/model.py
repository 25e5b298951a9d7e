"""The model: lm-eval's HFLM, whose generations come from one dense prefill and a method's own attention at every decode step."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from fathom_eval.decode import BranchResult, decode
from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.lm_eval.arguments import batch_size_of, branch_of, device_of, method_spec
from fathom_eval.lm_eval.compat import quiet_model_in_memory
from fathom_eval.models import LoadedModel, load_model
from fathom_eval.observations import needed_observations
from fathom_eval.prefill import prefill

LOGLIKELIHOOD = ("dense", "refuse")
_CACHE_KEY = "fathom-eval"
# Of these, greedy decoding takes nothing but the switch itself.
_SAMPLING = frozenset({"do_sample", "temperature", "top_p", "top_k", "min_p"})

_log = logging.getLogger(__name__)


class FathomLM(HFLM):  # type: ignore[misc] # lm-eval has no type information
    """A model of transformers that decodes with one method. Prompts, chat templates, stop strings and batching are HFLM's.

    The prompt is prefilled densely. Every generated token, the first one too, comes from the method's own attention, as in
    ``fathom-eval ruler``. Log-likelihoods have no decode step: they are answered by dense attention, and the log says so.

    Args:
        pretrained: Bundled name, folder, GGUF file or hub id; or a model that is loaded already.
        method: ``fathom`` or ``fathom:budget=48``.
        k: Keys that a query head attends to. Dense attention takes none.
        loglikelihood: ``dense`` answers such requests by dense attention, ``refuse`` raises.
        dtype, device, revision, trust_remote_code, rope_scaling, offline: See :func:`fathom_eval.models.load_model`. ``auto`` is float32
            on a CPU, where ``hf`` takes the checkpoint's own.
        max_length: Fewer tokens than the model holds.
        batch_size: Of log-likelihood requests; every generation has a prefill and a decoding of its own.
        add_bos_token, prefix_token_id, chat_template_args, enable_thinking, think_end_token: As HFLM has them.
        options: Options of the method and of the selection (``budget=48``, ``rerank=2``).

    Raises:
        UserError: An argument is unknown or unusable, or the model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str | LoadedModel = "",
        method: str = "fathom",
        k: int | None = None,
        *,
        loglikelihood: str = "dense",
        dtype: str = "auto",
        device: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        rope_scaling: str | None = None,
        offline: bool = False,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        **options: Any,
    ) -> None:
        spec = method_spec(method, options, list(inspect.signature(FathomLM.__init__).parameters)[1:-1])
        if not pretrained:
            raise UserError("model_args name no model: give pretrained=, a hub id, a local folder, a GGUF file or smollm2")
        if loglikelihood not in LOGLIKELIHOOD:
            raise UserError(f"unknown loglikelihood '{loglikelihood}' in model_args; {did_you_mean(loglikelihood, LOGLIKELIHOOD)}")
        size = batch_size_of(batch_size, max_batch_size)
        if isinstance(pretrained, str):
            pretrained = load_model(
                pretrained,
                dtype=dtype,
                device=device_of(device),
                offline=offline,
                revision=revision,
                trust_remote_code=trust_remote_code,
                rope_scaling=rope_scaling,
            )
        facts = pretrained.facts
        if max_length is not None and not 3 <= max_length <= facts.max_positions:
            raise UserError(
                f"max_length={max_length} in model_args must be at least 3 and at most the {facts.max_positions} of {facts.name}"
            )
        self.branch = branch_of(spec, k, facts)
        self.loaded = pretrained
        self.results: list[BranchResult] = []
        self._loglikelihood = loglikelihood
        self._said: set[str] = set()
        with quiet_model_in_memory():
            super().__init__(
                pretrained=pretrained.model,
                tokenizer=pretrained.tokenizer,
                backend="causal",
                revision=revision,
                batch_size=size,
                max_length=max_length or facts.max_positions,
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
                enable_thinking=enable_thinking,
                think_end_token=think_end_token,
            )
        # HFLM of lm-eval 0.4.10 drops these unless enable_thinking is given.
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, truncation: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As HFLM encodes, but a prompt that is too long is an error: its beginning would be cut off, and the needle with it.

        Raises:
            UserError: A prompt has more than ``left_truncate_len`` tokens.
        """
        token_ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        longest, name = int(mask.sum(-1).max()), self.loaded.facts.name
        if left_truncate_len is not None and longest > left_truncate_len:
            raise UserError(
                f"a prompt has {longest} tokens and {self.max_length - left_truncate_len} are to be generated, but {name} holds "
                f"{self.max_length}: lm-eval would cut the beginning of the prompt; take shorter prompts or a smaller max_gen_toks"
            )
        return token_ids, mask

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """What HFLM takes from ``generate``: ``[rows, context + generated]``, padded at the right."""
        mask = generation_kwargs.pop("attention_mask")
        self._check_greedy(generation_kwargs)
        limit = max_length - context.shape[1]
        if limit < 1:
            raise UserError(f"max_length={max_length} in the generation arguments leaves nothing to generate; give max_gen_toks instead")
        prompts = [
            [token for token, kept in zip(row, keep, strict=True) if kept]
            for row, keep in zip(context.tolist(), mask.tolist(), strict=True)
        ]
        generated = [self._generate(prompt, limit, stop) for prompt in prompts]
        longest = max(map(len, generated))
        padded = [[*tokens, *[self.tokenizer.pad_token_id] * (longest - len(tokens))] for tokens in generated]
        return torch.cat([context, torch.tensor(padded, dtype=context.dtype, device=context.device)], dim=-1)

    @staticmethod
    def _check_greedy(given: Mapping[str, Any]) -> None:
        if given.get("do_sample"):
            raise UserError("the task or --gen_kwargs asks for do_sample: methods are decoded greedily; give --gen_kwargs do_sample=false")
        for name, value in given.items():
            if name not in _SAMPLING and value is not None:
                raise UserError(f"the generation argument {name}={value} cannot be followed: methods are decoded greedily")

    def _generate(self, prompt: Sequence[int], limit: int, stop: Sequence[str]) -> tuple[int, ...]:
        loaded, k = self.loaded, self.branch.k
        if k is not None and k >= len(prompt) + limit:
            self._say_once(f"k={k} selects every token of prompts up to {k - limit} tokens: the method equals dense attention there")
        ends = {self.tok_decode([token], skip_special_tokens=False) for token in loaded.facts.eos_token_ids}
        strings = tuple(string for string in stop if string and string not in ends)
        prefix = prefill(loaded, prompt, observations=needed_observations([self.branch.spec.method], loaded.facts))
        [result] = decode(loaded, prefix, [self.branch], limit, stop_strings=strings)
        if result.finish == "stop":
            text = str(loaded.tokenizer.decode(result.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            if not any(string in text for string in strings):
                # The stop string began in the prompt. lm-eval looks at the generation alone, and cuts it at the first one.
                [result] = decode(loaded, prefix, [self.branch], limit)
        if result.finish == "error":
            raise UserError(f"{self.branch.spec.label} failed on a prompt of {len(prompt)} tokens: {result.error}")
        self.results.append(result)
        return result.token_ids

    def _loglikelihood_tokens(self, requests: Any, *arguments: Any, **options: Any) -> Any:
        if self._loglikelihood == "refuse":
            raise UserError(
                "a task asks for log-likelihoods, which have no decode step that a method could change: take tasks that generate, "
                "or loglikelihood=dense"
            )
        if self.branch.k is not None:
            label = self.branch.spec.label
            self._say_once(f"log-likelihoods have no decode step: dense attention answers them, and the results say nothing of {label}")
        return super()._loglikelihood_tokens(requests, *arguments, **options)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's cache of answers (``--use_cache``), whose keys know the requests but not the model.

        Raises:
            UserError: The cache holds answers of another model, method or k.
        """
        stored = getattr(cache_hook, "dbdict", None)
        if stored is not None:
            known = stored.get(_CACHE_KEY) if len(stored) else self._identity
            if known != self._identity:
                raise UserError(
                    f"the file of --use_cache holds answers of {known or 'another model'}, this is {self._identity}: name another"
                )
            stored[_CACHE_KEY] = self._identity
        super().set_cache_hook(cache_hook)

    @property
    def _identity(self) -> str:
        facts, spec = self.loaded.facts, self.branch.spec
        at = "" if self.branch.k is None else f" at k={self.branch.k}"
        return f"{facts.name} ({facts.model_fingerprint[:12]}, {facts.dtype}) with {spec.label}{at}, version {spec.method.version}"

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the results: the method, and what its scans read, as means over generations."""
        facts, spec = self.loaded.facts, self.branch.spec
        bits = [result.bits for result in self.results if result.bits is not None]
        attended = sum(result.steps for result in self.results) * facts.layers
        return {
            "model_num_parameters": self.loaded.model.num_parameters(),
            "model_dtype": facts.dtype,
            "model_revision": self.revision,
            "model_sha": facts.model_fingerprint,
            "method": spec.label,
            "method_version": spec.method.version,
            "k": self.branch.k,
            "generations": len(self.results),
            "scan_bits_per_token": fmean(bits) if bits else None,
            "rows": fmean(result.rows for result in self.results) if self.results else None,
            "fired": sum(result.fired for result in self.results) / attended if attended else None,
        }

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.warning(line)
