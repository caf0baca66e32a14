"""Suggestions for an unknown key, section, name or value.

Tables translate the words of torchtitan, Megatron-LM, diffusers, Lightning, Hydra and the original
DiT. Other words are compared with the keys of all sections.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

MEANT = {
    "checkpoint.async_save": "async_mode",
    "checkpoint.dir": "checkpoint.folder save_checkpoint_path",
    "checkpoint.every": "save_interval save_every save_steps checkpointing_steps ckpt_every "
    "checkpoint.interval checkpoint.steps checkpoint.freq every_n_train_steps",
    "checkpoint.keep": "keep_latest_k checkpoints_total_limit save_total_limit save_top_k",
    "checkpoint.resume": "load resume_from_checkpoint ckpt_path initial_load_path resume_from "
    "checkpoint.path ckpt checkpoint.load",
    "compile.enabled": "compile torch_compile use_compile",
    "data.path": "dataset_path data_dir train_data_dir dataset_dir feature_path",
    "data.tokenizer": "tokenizer_model tokenizer_type tokenizer_path",
    "data.num_workers": "dataloader_num_workers",
    "ema.decays": "ema_decay ema.decay",
    "ema.power": "ema.stds ema.sigma_rel ema.power_stds ema.std",
    "ema.warmup": "ema_warmup",
    "faults.step_timeout_s": "train_timeout_seconds distributed_timeout_minutes",
    "job.dir": "output_dir results_dir dump_folder default_root_dir out_dir save_dir save logdir "
    "log_dir logging_dir run_dir workdir",
    "job.name": "run_name exp_name experiment_name experiment",
    "job.seed": "global_seed seed_everything random_seed",
    "lr_scheduler.decay": "lr_scheduler lr_scheduler_type lr_decay_style decay_type scheduler",
    "lr_scheduler.decay_steps": "lr_decay_iters lr_decay_steps",
    "lr_scheduler.min_lr_ratio": "min_lr_factor min_lr lr_min",
    "lr_scheduler.wsd_decay": "lr_wsd_decay_style",
    "lr_scheduler.wsd_decay_steps": "lr_wsd_decay_iters",
    "lr_scheduler.warmup_fraction": "lr_warmup_fraction warmup_ratio warmup_fraction",
    "lr_scheduler.warmup_steps": "lr_warmup_steps lr_warmup_iters warmup warmup_iters "
    "num_warmup_steps",
    "metrics.every": "log_freq log_interval log_every log_every_n_steps logging_steps print_freq "
    "metrics.interval metrics.freq",
    "metrics.tensorboard": "enable_tensorboard tensorboard_dir",
    "metrics.wandb": "enable_wandb report_to use_wandb",
    "model.bias": "disable_bias_linear",
    "model.dropout": "hidden_dropout hidden_dropout_prob resid_pdrop",
    "model.hidden_size": "hidden_dim dim embed_dim d_model width",
    "model.in_channels": "latent_channels",
    "model.init_std": "init_method_std initializer_range",
    "model.latent_size": "input_size sample_size",
    "model.intermediate_size": "ffn_hidden_size",
    "model.mlp": "swiglu",
    "model.norm": "normalization",
    "model.norm_eps": "norm_epsilon layernorm_epsilon layer_norm_eps",
    "model.num_heads": "num_attention_heads n_heads",
    "model.num_key_value_heads": "num_query_groups group_query_attention n_kv_heads",
    "model.num_layers": "num_hidden_layers n_layers depth",
    "model.position_embedding_type": "use_rotary_position_embeddings",
    "model.rope_theta": "rotary_base",
    "model.size": "flavor model_size variant",
    "model.tie_word_embeddings": "untie_embeddings_and_output_weights",
    "model.vocab_size": "padded_vocab_size",
    "objective.condition_dropout": "class_dropout_prob cfg_dropout classifier_free_guidance_prob",
    "objective.mask_end_of_document": "eod_mask_loss",
    "objective.mask_share": "mask_prob mlm_probability",
    "objective.min_snr_gamma": "snr_gamma",
    "objective.prediction": "prediction_type parameterization",
    "objective.sentence_order": "bert_no_binary_head",
    "objective.t_max": "max_timestep",
    "objective.t_min": "min_timestep",
    "objective.timesteps": "weighting_scheme timestep_sampling",
    "repa.block": "encoder_depth",
    "repa.hidden_size": "projector_dim",
    "repa.projector": "projection_layer_type",
    "repa.spatial_norm": "spnorm_method zscore_alpha",
    "repa.weight": "proj_coeff repa_weight",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.lr": "learning_rate base_lr max_lr lr",
    "optimizer.weight_decay": "adam_weight_decay wd",
    "parallel.async_tp": "enable_async_tensor_parallel",
    "parallel.cp": "context_parallel_degree context_parallel_size context_parallel",
    "parallel.cp_method": "context_parallel_rotate_method cp_comm_type",
    "parallel.dp_replicate": "data_parallel_replicate_degree ddp hsdp",
    "parallel.dp_shard": "data_parallel_shard_degree fsdp dp data_parallel_size",
    "parallel.pp": "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel",
    "parallel.reshard_after_forward": "fsdp_reshard_after_forward",
    "parallel.tp": "tensor_parallel_degree tensor_model_parallel_size tensor_parallel",
    "pipeline.schedule": "pipeline_parallel_schedule",
    "pipeline.virtual_stages": "num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank",
    "precision.attention": "attention_backend enable_xformers_memory_efficient_attention "
    "use_flash_attn flash_attention",
    "precision.dtype": "mixed_precision mixed_precision_param precision bf16 fp16 amp dtype",
    "precision.float8": "fp8_format fp8",
    "precision.loss_scale": "static_loss_scale",
    "precision.loss_scale_hysteresis": "hysteresis",
    "precision.loss_scale_init": "initial_loss_scale init_scale initial_scale_power",
    "precision.loss_scale_min": "min_loss_scale",
    "precision.loss_scale_window": "growth_interval",
    "profile.enabled": "profile enable_profiling profiler",
    "profile.memory": "enable_memory_snapshot record_memory_history",
    "activation_checkpoint.mode": "activation_checkpointing gradient_checkpointing "
    "recompute_granularity recompute_activations checkpoint_activations use_checkpoint",
    "sampling.cfg_scale": "guidance_scale",
    "sampling.every": "sample_every sampling.interval sampling.freq",
    "sampling.steps": "num_inference_steps num_sampling_steps",
    "training.deterministic": "deterministic_mode",
    "training.epochs": "num_epochs max_epochs num_train_epochs",
    "training.gc_every": "gc_freq manual_gc_interval",
    "training.global_batch_size": "batch_size train_batch_size bs total_batch_size",
    "training.max_grad_norm": "max_norm clip_grad gradient_clip_val grad_clip clip_grad_norm "
    "gradient_clipping",
    "training.microbatch_size": "micro_batch_size local_batch_size per_device_train_batch_size "
    "pipeline_parallel_microbatch_size batch_size_per_gpu",
    "training.steps": "max_steps max_train_steps train_iters num_steps total_steps iterations "
    "max_iters num_iterations num_train_steps steps",
    "validation.every": "eval_interval eval_every eval_steps validation_steps val_check_interval "
    "validation.freq validation.interval check_val_every_n_epoch",
    "validation.path": "valid_data_path",
    "validation.samples": "eval_iters limit_val_batches validation.steps",
}
"""Our key -> its names in other projects, and what users guess. A word with a dot matches only as
"section.key"."""

SAID = {
    "config_file job.config_file cfg conf c": "Write --config FILE.",
    "dryrun dry": "Write --dry-run.",
    "nproc_per_node nproc gpus num_gpus ngpu ngpus devices world_size": "Ranks of this node are an "
    "environment variable: NGPU=4 before the command.",
    "nnodes num_nodes nodes": "Nodes are an environment variable: NNODES=2 before the command, "
    "with RDZV_ENDPOINT (docs/launching.md).",
    "rdzv_endpoint master_addr master_port rdzv_backend node_rank": "The node to meet at is an "
    "environment variable: RDZV_ENDPOINT=host:port before the command (docs/launching.md).",
    "rdzv_id": "It is an environment variable: RDZV_ID=NAME before the command.",
    "max_restarts": "It is an environment variable: MAX_RESTARTS=10 before the command.",
    "standalone": "Leave it out: one node is the default.",
    "accelerator device": "Leave it out: GPUs are used if there are any.",
    "strategy use_distributed_optimizer": "Layouts are the sizes of [parallel]: dp_shard is FSDP2, "
    "dp_replicate DDP.",
    "gradient_accumulation_steps accumulate_grad_batches grad_accum gradient_accumulation": "It "
    "follows from global_batch_size: set --training.microbatch_size, the samples of one forward "
    "pass on a rank.",
    "use_ema": "[ema] is on by default; --ema.decays [] turns it off.",
    "model": 'The network\'s size is --model.size, such as "XL/2".',
    "image_size resolution": "Set --model.latent_size, of the autoencoder's latents: 32 for images "
    "of 256 pixels and Stable Diffusion's.",
    "dataset": "The data is --data.name latents --data.path FOLDER.",
    "optimizer": "It is --optimizer.name, such as adamw, adamw8bit or muon.",
    "resume": "A run resumes by the same command; another checkpoint is --checkpoint.resume PATH.",
    "seq_len seq_length seqlen max_position_embeddings": "Set sequence_length of [model] and "
    "[data]; a DiT's tokens follow from [model] latent_size and patch_size.",
    "data_path train_data_path": "Set --data.path FOLDER of latents; of text --data.name tokens "
    "and --data.paths, each a .bin and .idx without the suffix.",
    "vocab_file merge_file": "Set --data.tokenizer, a tokenizer.json: `data tokenize` writes one "
    "of vocabulary files.",
    "append_eod split_sentences json_keys": "It is a flag of `data tokenize`.",
    "data_cache_path": "Leave it out: no indices are written.",
    "reset_position_ids reset_attention_mask": "Leave it out: a window attends over the ends of "
    "documents.",
    "attention_dropout": "Leave it out: --model.dropout is that of hidden channels, attention has "
    "none.",
    "make_vocab_size_divisible_by": "Leave it out: tables have a multiple of 128 rows.",
    "train_samples lr_decay_samples lr_warmup_samples": "Give steps: samples / global_batch_size.",
    "rampup_batch_size": "Leave it out: the batch size is constant.",
    "recompute_method recompute_num_layers": "Leave it out: all blocks have the same "
    "--activation_checkpoint.mode.",
    "distribute_saved_activations": "Leave it out: with --parallel.sequence_parallel the inputs of "
    "blocks are sharded over tp.",
    "overlap_grad_reduce overlap_param_gather accumulate_allreduce_grads_in_fp32": "Leave it out: "
    "it is always on.",
    "num_experts expert_model_parallel_size": "Leave it out: there are no experts.",
    "exit_duration_in_mins exit_signal_handler": "Leave it out: a run saves and exits at SIGTERM "
    "or SIGUSR1 (docs/launching.md).",
    "finetune no_load_optim no_load_rng": "Leave it out: a new run starts at another one's weights "
    "by --checkpoint.init PATH.",
    "vae": "`data encode` makes latents with an autoencoder (docs/encoding.md). --sampling.vae is "
    "the one that decodes previews.",
}
"""Words that correspond to no key -> the sentence to print."""

MEANT_SECTIONS = {
    "metrics": "logging logger log wandb tensorboard",
    "parallel": "parallelism distributed fsdp",
    "activation_checkpoint": "activation_checkpointing recompute gradient_checkpointing",
    "fid": "picture_scores",
    "generation": "generate generation_config text",
    "lr_scheduler": "scheduler",
    "training": "trainer train training_args hyperparameters",
    "optimizer": "optim optimizers",
    "data": "dataset dataloader datamodule dataset_params",
    "job": "run experiment general",
    "profile": "profiling profiler",
    "faults": "comm fault_tolerance",
    "precision": "float8 quantize mixed_precision amp",
    "checkpoint": "checkpointing ckpt checkpoints",
    "objective": "loss diffusion transport flow",
    "model": "network net dit backbone",
    "sampling": "sample sampler preview inference",
    "validation": "eval val",
}
"""Our section -> its names in other projects."""

VALUES = {
    "bf16": "bfloat16 torch.bfloat16 bf16-mixed",
    "fp16": "float16 torch.float16 16-mixed fp16-mixed half",
    "fp32": "float32 float torch.float32 tf32 no",
    "fp64": "float64 double",
    "adamw": "adam",
    "rectified_flow": "flow_matching flow fm sit rf transport",
    "ddpm": "diffusion gaussian gaussian_diffusion",
    "latents": "latent imagenet imagefolder folder npy",
    "gpt": "gpt2 gpt-2 gpt3 llama",
    "rotary": "rope",
    "learned": "learned_absolute",
    "dit": "dit-xl dit-xl/2 dit-l/2 dit-b/2 dit-s/2",
    "constant": "constant_with_warmup",
    "full": "block",
}
"""Our name or value -> its names in other projects."""


def inverted(table: Mapping[str, str]) -> dict[str, str]:
    """Invert a table: each foreign word -> ours."""
    return {word: ours for ours, words in table.items() for word in words.split()}


KEYS, SECTIONS, NAMES = inverted(MEANT), inverted(MEANT_SECTIONS), inverted(VALUES)
SENTENCES = {word: said for words, said in SAID.items() for word in words.split()}
CLOSE, ELSEWHERE = 0.6, 0.75
"""Minimum similarity (difflib ratio) of a suggestion from the same section, and from any."""


@dataclass(frozen=True)
class Known:
    """The keys of all sections."""

    keys: Mapping[str, Collection[str]]
    """Section -> keys; for a section with several classes, the chosen class's keys."""
    others: Mapping[str, Mapping[str, Collection[str]]]
    """Section -> name -> keys of the classes that are not chosen."""

    def with_name(self, section: str, key: str) -> str | None:
        """The name of a class of `section` that has `key`, unless the chosen one has it."""
        if key in self.keys.get(section, ()):
            return None
        rows = self.others.get(section, {})
        return next((name for name, keys in rows.items() if key in keys), None)


def nearest(word: str, valid: Iterable[str]) -> str:
    """Ending of an "unknown word" message: the nearest valid word, or all valid words."""
    valid = sorted(valid)
    return for_value(word, valid) or f" Valid: {', '.join(valid)}."


def for_value(word: object, valid: Collection[object]) -> str:
    """Ending of the message about an invalid value; "" without a suggestion."""
    if not isinstance(word, str):
        return ""
    ours = NAMES.get(word.lower())
    found = ours if ours in valid else like(word, map(str, valid), CLOSE)
    return f" Did you mean {found}?" if found else ""


def like(word: str, valid: Iterable[str], least: float) -> str | None:
    """The most similar valid word, ignoring case; None if its similarity is below `least`."""
    by_lower = {name.lower(): name for name in valid}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=least)
    return by_lower[close[0]] if close else None


def for_key(section: str, key: str, known: Known) -> str:
    """Ending of the message about a key that `section` lacks."""
    if (name := known.with_name(section, key)) is not None:
        return f' name="{name}" has it: add --{section}.name {name}.'
    if said := meant(section, key, known):
        return said
    if near := like(key, known.keys[section], CLOSE):
        return f" Did you mean {near}?"
    return anywhere(key, known) or nearest(key, known.keys[section])


def for_section(section: str, keys: Iterable[str], known: Known) -> str:
    """Ending of the message about an unknown section that holds `keys`."""
    ours = SECTIONS.get(section.lower()) or like(section, known.keys, CLOSE)
    elsewhere = [key for key in keys if not ours or key not in known.keys[ours]]
    said = (meant(section, key, known) for key in elsewhere)
    if found := next(filter(None, said), None):
        return found
    return f" Did you mean {ours}?" if ours else nearest(section, known.keys)


def for_flag(word: str, known: Known) -> str:
    """Ending of the message about a flag without a section."""
    if said := meant("", word, known):
        return said
    if (dotted := re.sub("[/:]", ".", word)) != word:
        return f" Write a dot: --{dotted}"
    if word in known.keys:
        listed = ", ".join(sorted(known.keys[word]))
        return f" [{word}] is a section: --{word}.KEY, with one of the keys {listed}."
    return anywhere(word, known) or ""


def meant(section: str, key: str, known: Known) -> str | None:
    """Suggestion from the tables, or a key of this name in another section; None without one."""
    word = key.lower().replace("-", "_")
    ours = SECTIONS.get(section.lower(), section.lower())
    for name in (f"{section}.{word}", f"{ours}.{word}", word):
        if name in SENTENCES:
            return f" {SENTENCES[name]}"
        if name in KEYS:
            return suggestion([KEYS[name]], known, section)
    found = [
        f"{where}.{name}"
        for where, keys in known.keys.items()
        for name in keys
        if name in (word, f"{section}_{word}")
    ]
    found += [
        f"{where}.{word}"
        for where in known.others
        if where != section and known.with_name(where, word) is not None
    ]
    return suggestion(found, known) if found else None


def anywhere(word: str, known: Known) -> str | None:
    """The most similar key of all sections."""
    places = {key: section for section, keys in known.keys.items() for key in keys}
    near = like(word, places, ELSEWHERE)
    return suggestion([f"{places[near]}.{near}"], known) if near else None


def suggestion(found: Iterable[str], known: Known, there: str = "") -> str:
    """`Did you mean [section] key (--section.key)?` for one or more "section.key".

    A key of `there`, the section in which it was looked up, is named without its section.
    """
    choices = []
    for path in found:
        section, key = path.split(".")
        if section == there and key in known.keys[section]:
            choices.append(key)
            continue
        name = known.with_name(section, key)
        extra = f" with --{section}.name {name}" if name is not None else ""
        choices.append(f"[{section}] {key} (--{path}{extra})")
    return f" Did you mean {' or '.join(choices)}?"
