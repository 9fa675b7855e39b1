// SPDX-License-Identifier: Apache-2.0
// Keys, ranges and help lines of TrainConfig.
#include "lockstep/config/schema_text.h"
#include "lockstep/config/train_config.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

// Names of all values of an enum of layout/.
template <class Enum>
std::vector<std::string> names_up_to(Enum last) {
  std::vector<std::string> names;
  for (int value = 0; value <= static_cast<int>(last); ++value)
    names.emplace_back(layout::name_of(static_cast<Enum>(value)));
  return names;
}

constexpr Limits kFromZero{.min = 0};
constexpr Limits kFromOne{.min = 1};
constexpr Limits kAboveZero{.min = 0, .above_min = true};
constexpr Limits kBelowOne{.min = 0, .max = 1, .below_max = true};

// factor, low and high frequency factor, original positions: a list, because files know no more.
Option rope_scaling_option(std::optional<RopeScaling>& scaling) {
  Option option{.type = OptionType::numbers,
                .help =
                    "Rotary frequencies stretched as Llama 3.1 does: factor, low and high "
                    "frequency factor, original positions; empty: not at all.",
                .limits = kFromZero};
  option.get = [&scaling]() -> Value {
    if (!scaling) return std::vector<double>{};
    return std::vector<double>{scaling->factor, scaling->low_freq_factor, scaling->high_freq_factor,
                               static_cast<double>(scaling->original_positions)};
  };
  option.put = [&scaling](const Value& value) {
    const auto& numbers = std::get<std::vector<double>>(value);
    scaling.reset();
    if (numbers.empty()) return;
    if (numbers.size() != 4 || numbers[3] > 1e15) {
      throw ConfigError(
          format("model.rope_scaling is {}, must be empty or four numbers: factor, "
                 "low and high frequency factor, original positions",
                 toml_literal(value)));
    }
    scaling = RopeScaling{numbers[0], numbers[1], numbers[2], static_cast<int64_t>(numbers[3])};
  };
  return option;
}

void add_model(Schema& schema, TrainConfig& config) {
  ModelSpec& model = config.model;
  schema.section("model", "The model");
  schema.add_choice("kind", model.kind, {"gpt", "llama"},
                    "gpt: learned positions, layer norms, GELU. llama: rotary positions, RMS "
                    "norms, SwiGLU.");
  schema.add("layers", model.layers, "Blocks.", kFromOne);
  schema.add("hidden", model.hidden, "Width of the residual stream.", kFromOne);
  schema.add("heads", model.heads, "Attention heads; must divide hidden.", kFromOne);
  schema.add("kv_heads", model.kv_heads, "Heads of keys and values (llama); 0: as many as heads.",
             kFromZero);
  schema.add("ffn", model.ffn,
             "Width inside the MLP; 0: 4 x hidden (gpt), 8/3 x hidden up to a multiple of 64 "
             "(llama).",
             kFromZero);
  schema.add("vocab", model.vocab, "Tokens; 0: the tokenizer's.", kFromZero);
  schema.add("positions", model.positions, "Longest sequence; 0: train.seq_len.", kFromZero);
  schema.add("dropout", model.dropout, "Chance that an element is dropped.", kBelowOne);
  schema.add("tied", model.tied,
             "The output matrix is the embedding: true, false, or auto (gpt: true, llama: false).");
  schema.add("rope_theta", model.rope_theta, "Base of the rotary frequencies (llama).", kAboveZero);
  schema.add_option("rope_scaling", rope_scaling_option(model.rope_scaling));
  schema.add("norm_epsilon", model.norm_epsilon, "Added to variances in norms.", kAboveZero);
  schema.add("path", config.model_path,
             "Hugging Face folder (gpt2 or llama) to start from; its sizes replace those above, "
             "but for dropout.");
}

void add_data(Schema& schema, DataConfig& data) {
  schema.section("data", "The data");
  schema.add("path", data.path, "Text or token file to train on.");
  schema.add(
      "tokenizer", data.tokenizer,
      "bytes (256 tokens), or a tokenizer.json or its folder; auto: the one in model.path, else "
      "bytes.");
  schema.add_text_or_number("validation", data.validation,
                            "What the validation loss is measured on: a fraction of the data, 0 to "
                            "0.5, taken from its end; or a file.");
}

void add_train(Schema& schema, RunConfig& train) {
  schema.section("train", "The run");
  schema.add("steps", train.steps, "Optimizer steps in all, those before a resume included.",
             kFromOne);
  schema.add("seq_len", train.seq_len, "Tokens of a sequence.", kFromOne);
  schema.add("micro_batch", train.micro_batch, "Sequences that a rank computes at once.", kFromOne);
  schema.add("global_batch", train.global_batch,
             "Sequences of a step over all ranks, a multiple of micro_batch x dp; 0: just that.",
             kFromZero);
  schema.add("seed", train.seed, "Of first weights, dropout and the order of the data.", kFromZero);
  schema.add_choice("dtype", train.dtype, {"float32", "bfloat16"},
                    "Of weights and activations; the optimizer keeps its own weights in float32.");
  schema.add_choice("recompute", train.recompute, {"none", "selective", "full"},
                    "What backward computes again instead of keeping it. auto: memory.strategy "
                    "decides.");
  schema.add("reproducible", train.reproducible,
             "The same bits whatever the number of ranks, by powers of two; slower.");
  schema.add("threads", train.threads, "Threads of a rank; 0: its cores, or 1 if reproducible.",
             kFromZero);
  schema.add("eval_every", train.eval_every,
             "Steps from one validation to the next; 0: at the end only.", kFromZero);
  schema.add("eval_tokens", train.eval_tokens,
             "How many tokens a validation takes, spread over the data held out; 0: all.",
             kFromZero);
  schema.add("log_every", train.log_every, "Steps from one line of progress to the next.",
             kFromOne);
  schema.add_choice("device", train.device, {"auto", "cpu", "cuda"},
                    "auto: the GPU of this rank where there is one.");
}

void add_optim(Schema& schema, OptimConfig& optim) {
  schema.section("optim", "The optimizer");
  schema.add_choice("name", optim.name, {"adamw", "sgd"}, "The rule of the update.");
  schema.add("lr", optim.lr, "Learning rate, at its highest.", kFromZero);
  schema.add("betas", optim.betas, "Decay of adamw's two averages.", kBelowOne);
  schema.add("eps", optim.eps, "Added to adamw's denominator.", kAboveZero);
  schema.add("momentum", optim.momentum, "Of sgd.", kBelowOne);
  schema.add("weight_decay", optim.weight_decay, "For matrices; never for biases and norms.",
             kFromZero);
  schema.add("clip", optim.clip, "Largest norm of the gradient; 0: any.", kFromZero);
  schema.add_choice("schedule", optim.schedule, {"constant", "linear", "cosine", "wsd"},
                    "Of the learning rate after the warm-up; wsd stays, and falls at the end.");
  schema.add("warmup", optim.warmup,
             "Steps in which the learning rate rises; auto: a tenth of the steps, at most 100.",
             kFromZero);
  schema.add("decay_steps", optim.decay_steps,
             "Steps at the end in which it falls; 0: all after the warm-up (wsd must give it).",
             kFromZero);
  schema.add("min_lr_ratio", optim.min_lr_ratio, "What is left of it at the end.",
             {.min = 0, .max = 1});
}

// Two orders have a name besides their spelling.
void add_order(Schema& schema, layout::Order& order) {
  Option option{.type = OptionType::choice,
                .help =
                    "Which axes neighbouring ranks differ on. A permutation has the slowest axis "
                    "first; pp_fastest is dp-tp-pp, tp_fastest, which keeps tp inside a host, "
                    "is pp-dp-tp.",
                .choices = names_up_to(layout::Order::pp_tp_dp)};
  option.choices.insert(option.choices.end(), {"dp-tp-pp", "pp-dp-tp"});
  option.get = [&order]() -> Value { return std::string(layout::name_of(order)); };
  option.put = [&order](const Value& value) {
    order = layout::parse_order(std::get<std::string>(value));
  };
  schema.add_option("order", std::move(option));
}

void add_layout(Schema& schema, TrainConfig& config) {
  LayoutConfig& parallel = config.parallel;
  schema.section("parallel", "The ranks");
  schema.add("dp", parallel.dp, "Replicas with data of their own; 0: what tp and pp leave.",
             kFromZero);
  schema.add("tp", parallel.tp, "Ranks that share each matrix.", kFromOne);
  schema.add("sequence_parallel", parallel.sequence_parallel,
             "tp ranks share the sequence where they do not share matrices: less memory for "
             "activations.");
  schema.add("pp", parallel.pp, "Ranks that the layers are cut over, as a pipeline.", kFromOne);
  add_order(schema, parallel.order);
  schema.add_choice("shard", parallel.shard, names_up_to(layout::ShardingStrategy::hybrid_shard),
                    "What dp ranks share instead of holding it all: parameters, gradients and "
                    "optimizer state (full); the same, with parameters kept from forward to "
                    "backward (grad_op); optimizer state (optimizer); full within parts of the "
                    "ranks (hybrid).");
  schema.add("shard_size", parallel.shard_size,
             "Neighbouring ranks that share under hybrid; 0: those of a host.", kFromZero);
  schema.add_choice("schedule", parallel.schedule, names_up_to(layout::PipelineSchedule::file),
                    "Order of the pipeline's work (lockstep schedule draws it). auto: 1f1b, or "
                    "interleaved where there are chunks.");
  schema.add("chunks", parallel.chunks, "Stages of each pipeline rank.", kFromOne);
  schema.add("group", parallel.group,
             "interleaved and zb-1p: micro-batches that a stage takes in turn; 0: as many as pp.",
             kFromZero);
  schema.add("split", parallel.split,
             "Layers of each stage, first to last; embeddings and head count as one each. Empty: "
             "equal shares of the blocks.");
  schema.add("schedule_file", parallel.schedule_file,
             "schedule file: the CSV to read, as lockstep schedule writes it.");

  schema.section("memory", "Memory");
  schema.add_choice("strategy", config.memory.strategy,
                    names_up_to(layout::MemoryStrategy::extreme),
                    "basic: keep all activations, the fastest while there is room. standard: "
                    "selective recomputation. aggressive: full recomputation. extreme: and what "
                    "is still kept goes to disk.");
  schema.add_bytes("max_per_device", config.memory.max_per_device,
                   "Most that a rank may take, such as 8GB: parameters, gradients and optimizer "
                   "state must fit, and torch's allocator holds to it. 0: what there is.");

  schema.add("disk", config.memory.disk,
             "Folder that extreme keeps activations in while it runs, best on a fast local disk. "
             "Empty: TMPDIR, or /tmp.");

  schema.section("comm", "Communication");
  schema.add_choice("backend", config.comm.backend, {"auto", "shm", "mpi", "gloo", "nccl"},
                    "What ranks communicate with. auto: the fastest that reaches all of them.");
  schema.add_choice("strategy", config.comm.strategy, names_up_to(layout::CommStrategy::adaptive),
                    "How sums are formed: the backend's own, within each host first, in a ring, in "
                    "a tree, or by size from a measured table.");
  schema.add_choice(
      "compression", config.comm.compression,
      {"none", "fp16", "bf16", "power-sgd", "fp16-across-hosts", "bf16-across-hosts"},
      "What gradients are sent as, where parallel.shard is none: 16-bit floats, thin factors, or "
      "16-bit floats between hosts only, with full precision inside them.");
  schema.add("timeout", config.comm.timeout,
             "Seconds to wait for a rank that is late; 0: LOCKSTEP_TIMEOUT, or 30.",
             {.min = 0, .max = 604800});
}

// One codec for all state, or one for each kind of it.
Option codec_option(layout::StateCodecs& codecs) {
  Option option{
      .type = OptionType::text,
      .help =
          "How optimizer state is kept: none, fp16 (second moment bf16), bf16, int8 (second "
          "moment quantization), quantization (8 bits, close together near zero) or "
          "lossless (LZ4, outside the device); or each kind by itself, as "
          "exp_avg=bf16,exp_avg_sq=quantization; and parameters and gradients on the host, as "
          "quantization,params=int8,grads=bf16 (params: bf16, int8, quantization or lossless)."};
  option.get = [&codecs]() -> Value { return layout::name_of(codecs); };
  option.put = [&codecs](const Value& value) {
    try {
      codecs = layout::parse_state_codecs(std::get<std::string>(value));
    } catch (const ConfigError& failure) {
      throw ConfigError(format("offload.codec: {}", failure.what()));
    }
  };
  return option;
}

void add_offload(Schema& schema, layout::OffloadOptions& offload) {
  schema.section("offload", "What leaves the device between its uses");
  schema.add("params", offload.params, "Parameters may rest in host memory.");
  schema.add("grads", offload.grads, "Gradients may.");
  schema.add("optimizer", offload.optimizer, "Optimizer state may (adamw only).");
  schema.add_bytes("param_budget", offload.param_budget,
                   "Most that parameters take on the device, gathered ones included. 0: 2GB, or "
                   "what the device or device_limit has, if that is less.");
  schema.add_bytes("host_budget", offload.host_budget,
                   "Most that a rank offloads to host memory. 0: 32GB, or what the host or "
                   "host_limit has, if that is less.");
  schema.add_bytes("device_limit", offload.device_limit,
                   "What pressure on the device is measured against: parameters, gradients, "
                   "optimizer state, what is on its way and, after the first step, activations. "
                   "0: 8GB, or what the device has, if that is less.");
  schema.add_bytes("host_limit", offload.advanced.host_limit,
                   "The same for host memory. 0: 64GB, or what the host has, if that is less.");
  schema.add("prefetch", offload.advanced.prefetch,
             "Parameters that are fetched ahead of their use.", kFromOne);
  schema.add("async_prefetch", offload.advanced.async_prefetch,
             "Fetch ahead beside the computation.");
  schema.add("pin", offload.advanced.pin,
             "Host memory that devices copy from without a detour. auto: where there is such a "
             "device.");
  schema.add("overlap", offload.advanced.overlap,
             "Transfers and updates run beside the computation.");
  schema.add_option("codec", codec_option(offload.codec));
  schema.add_choice("strategy", offload.advanced.strategy,
                    names_up_to(layout::OffloadStrategy::extreme),
                    "How early what may leave does, and how much of it: beyond 0.9, 0.75, 0.6, 0.4 "
                    "of device_limit a fifth, half, four fifths, all of that is freed.");
  schema.add("disk", offload.disk,
             "Folder for optimizer state that the host budget does not hold; empty: none.");
  schema.add_choice("update_site", offload.advanced.update_site,
                    names_up_to(layout::UpdateSite::device),
                    "Where the optimizer computes. auto: where a short measurement finds it "
                    "faster.");
  schema.add_choice("clip_mode", offload.advanced.clip_mode, names_up_to(layout::ClipMode::none),
                    "exact: gradients are clipped by the norm of all of them. none: not at all, "
                    "and each parameter is updated as soon as it has its gradient (optim.clip 0).");
}

void add_output(Schema& schema, TrainConfig& config) {
  schema.section("checkpoint", "Checkpoints");
  schema.add("dir", config.checkpoint.dir, "Folder for them; empty: none is written.");
  schema.add("every", config.checkpoint.every, "Steps from one to the next; 0: at the end only.",
             kFromZero);
  schema.add("keep", config.checkpoint.keep, "How many of the newest stay; 0: all.", kFromZero);
  schema.add("resume", config.checkpoint.resume,
             "none: begin anew. auto: go on from the newest in dir, if there is one. Else the path "
             "of a checkpoint.");
  schema.add_choice("load", config.checkpoint.load, {"all", "model"},
                    "What is loaded from the path: all, to go on where it was; or the model's "
                    "weights, to begin at step 0 with them.");
  schema.add("partial", config.checkpoint.partial,
             "Load what fits: tensors that are missing, too many or of another shape are a "
             "warning, not an error.");
  schema.add("other_data", config.checkpoint.other_data,
             "Resume on other data than the checkpoint was trained on; without it, that is an "
             "error.");
  schema.add("async", config.checkpoint.async,
             "Train on while a checkpoint is written; takes memory for a copy of what each rank "
             "writes.");
  schema.add_choice("when_busy", config.checkpoint.when_busy, {"wait", "skip"},
                    "With async, where the one before is still being written: wait for it, or "
                    "leave this one out. The last is never left out.");

  schema.section("metrics", "What is recorded");
  schema.add("file", config.metrics.file, "One line of JSON for each step; empty: none.");
  schema.add("trace", config.metrics.trace,
             "Folder for Chrome traces, one of each rank; empty: none.");
}

}  // namespace

Schema train_schema(TrainConfig& config) {
  Schema schema;
  add_model(schema, config);
  add_data(schema, config.data);
  add_train(schema, config.train);
  add_optim(schema, config.optim);
  add_layout(schema, config);
  add_offload(schema, config.offload);
  add_output(schema, config);
  return schema;
}

std::string to_json(const TrainConfig& config) {
  TrainConfig copy = config;
  return json_text(train_schema(copy));
}

TrainConfig train_config_from_json(const std::string& text, const std::string& path) {
  TrainConfig config;
  train_schema(config).read_text(text, path);
  return config;
}

}  // namespace lockstep::config
