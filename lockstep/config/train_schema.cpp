// SPDX-License-Identifier: Apache-2.0
// Keys, ranges and help lines of TrainConfig.
#include <array>
#include <utility>

#include "lockstep/config/recompute_schema.h"
#include "lockstep/config/schema/schema_text.h"
#include "lockstep/config/train_config.h"
#include "lockstep/config/train_output_schema.h"
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

constexpr Limits kFromOne{.min = 1};
constexpr Limits kAboveZero{.min = 0, .above_min = true};
constexpr Limits kBelowOne{.min = 0, .max = 1, .below_max = true};

// Short forms of the flags that most runs give.
constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kAliases = {{
    {"data", "data.path"},
    {"steps", "train.steps"},
    {"lr", "optim.lr"},
    {"seq-len", "train.seq_len"},
    {"batch", "train.global_batch"},
    {"micro-batch", "train.micro_batch"},
    {"seed", "train.seed"},
    {"dtype", "train.dtype"},
    {"device", "train.device"},
    {"resume", "checkpoint.resume"},
    {"recovery", "run.recovery"},
}};

// What other programs call some of them.
constexpr std::pair<std::string_view, std::string_view> kElsewhere[] = {
    {"learning-rate", "optim.lr"},
    {"lr-scheduler", "optim.schedule"},
    {"lr-scheduler-type", "optim.schedule"},
    {"warmup-steps", "optim.warmup"},
    {"optimizer", "optim.name"},
    {"max-grad-norm", "optim.clip"},
    {"batch-size", "train.global_batch"},
    {"train-batch-size", "train.global_batch"},
    {"micro-batch-size", "train.micro_batch"},
    {"per-device-train-batch-size", "train.micro_batch"},
    {"epochs", "train.steps"},
    {"num-epochs", "train.steps"},
    {"num-train-epochs", "train.steps"},
    {"max-steps", "train.steps"},
    {"max-seq-len", "train.seq_len"},
    {"max-seq-length", "train.seq_len"},
    {"block-size", "train.seq_len"},
    {"context-length", "train.seq_len"},
    {"output-dir", "run.dir"},
    {"save-steps", "checkpoint.every"},
    {"num-layers", "model.layers"},
    {"hidden-size", "model.hidden"},
    {"num-attention-heads", "model.heads"},
};

// factor, low and high frequency factor, original positions: a list, because files know no more.
Option rope_scaling_option(std::optional<RopeScaling>& scaling) {
  Option option{.type = OptionType::numbers,
                .help =
                    "Scale the rotary frequencies as Llama 3.1 does: factor, low and high "
                    "frequency factor, original positions. An empty list disables scaling.",
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
  schema.section("model", "Model");
  schema.add_choice("kind", model.kind, {"gpt", "llama"},
                    "Architecture. gpt: learned positions, layer norm and GELU. llama: rotary "
                    "positions, RMS norm and SwiGLU.");
  schema.add("layers", model.layers, "Number of transformer blocks.", kFromOne);
  schema.add("hidden", model.hidden, "Width of the residual stream, in elements.", kFromOne);
  schema.add("heads", model.heads,
             "Number of attention heads; must divide model.hidden unless model.head_dim is set.",
             kFromOne);
  schema.add("kv_heads", model.kv_heads,
             "Number of key and value heads (llama only); 0 uses model.heads.", kFromZero);
  schema.add("head_dim", model.head_dim,
             "Width of each attention head (llama only); 0 uses model.hidden / model.heads.",
             kFromZero);
  schema.add("ffn", model.ffn,
             "Width of the MLP's hidden layer; 0 uses 4 x model.hidden (gpt), or 8/3 x "
             "model.hidden rounded up to a multiple of 64 (llama).",
             kFromZero);
  schema.add("vocab", model.vocab, "Vocabulary size, in tokens; 0 uses the tokenizer's.",
             kFromZero);
  schema.add("positions", model.positions,
             "Longest sequence that the model accepts, in tokens; 0 uses train.seq_len.",
             kFromZero);
  schema.add("dropout", model.dropout, "Dropout probability.", kBelowOne);
  schema.add("tied", model.tied,
             "Use the token embedding as the output matrix. auto: true for gpt, false for llama.");
  schema.add("rope_theta", model.rope_theta, "Base of the rotary frequencies (llama only).",
             kAboveZero);
  schema.add_option("rope_scaling", rope_scaling_option(model.rope_scaling));
  schema.add("qkv_bias", model.qkv_bias,
             "Add a bias to queries, keys and values, as Qwen2 does (llama only).");
  schema.add("qk_norm", model.qk_norm,
             "Normalize each query and key head before the rotation, as Qwen3 does (llama only).");
  schema.add("window", model.window,
             "Tokens that each token attends to, itself and those before it, as Mistral's sliding "
             "window (llama only); 0 attends to all tokens before it.",
             kFromZero);
  schema.add("norm_epsilon", model.norm_epsilon, "Epsilon of the norms, added to the variance.",
             kAboveZero);
  schema.add(
      "path", config.model_path,
      "Hugging Face folder (gpt2, llama, mistral, qwen2 or qwen3) to load the initial "
      "weights from. Its sizes count: an option above that differs from them is an error, except "
      "model.dropout.");
}

void add_data(Schema& schema, DataConfig& data) {
  schema.section("data", "Data");
  schema.add("path", data.path,
             "Text file, folder of text files, token file (.bin) or JSON lines (.jsonl) to train "
             "on. Records of JSON lines have text, or prompt and completion; the loss then counts "
             "the completions only.");
  schema.add("tokenizer", data.tokenizer,
             "Tokenizer: bytes (256 tokens), or the path of a tokenizer.json or of its folder. "
             "auto: the tokenizer in model.path or of the checkpoint that is loaded, or bytes "
             "without either.");
  schema.add_text_or_number("validation", data.validation,
                            "Validation data: a fraction of the training data, 0 to 0.5, held out "
                            "from its end (of its examples, with prompts and completions); or a "
                            "separate file.");
  schema.add("pack", data.pack,
             "Fill each row with whole documents, or examples. Tokens attend to their own document "
             "only, and positions restart with each.");
}

void add_train(Schema& schema, RunConfig& train) {
  schema.section("train", "Training");
  schema.add("steps", train.steps,
             "Total number of optimizer steps, including the steps before a resume.", kFromOne);
  schema.add("seq_len", train.seq_len,
             "Sequence length, in tokens. The default is reduced to the positions of a model that "
             "is loaded.",
             kFromOne);
  schema.add("micro_batch", train.micro_batch, "Sequences per forward pass on each rank.",
             kFromOne);
  schema.add("global_batch", train.global_batch,
             "Sequences per optimizer step over all ranks; a multiple of train.micro_batch, best "
             "of train.micro_batch x parallel.dp. 0 uses exactly that product.",
             kFromZero);
  schema.add("seed", train.seed,
             "Random seed of the initial weights, of dropout and of the data order.", kFromZero);
  schema.add_choice("precision", train.precision, {"float32", "bfloat16", "fp8"},
                    "Precision of the training. fp8: the linear layers of blocks multiply 8-bit "
                    "floats, e4m3 and, for gradients, e5m2; everything else has the type of "
                    "train.dtype, or bfloat16. auto: that of train.dtype.");
  schema.add_choice(
      "dtype", train.dtype, {"float32", "bfloat16"},
      "Type of weights and activations. The optimizer keeps a float32 copy of bfloat16 weights. "
      "auto: that of train.precision, or float32.");
  schema.add("fp8_min", train.fp8_min,
             "train.precision fp8: smallest size of a product in 8 bits; a layer with fewer inputs "
             "or outputs, or whose sizes are no multiples of 16, keeps its type. 0: every layer. "
             "auto: 512.",
             kFromZero);
  add_recompute(schema, train);
  add_tile(schema, train);
  schema.add_choice("graphs", train.graphs, {"on", "off"},
                    "Record forward and backward of a micro-batch as CUDA graphs and repeat them, "
                    "which saves CPU time. on: an error where other options do not allow it "
                    "(docs/training.md). auto: where they do, and the free memory is at least "
                    "twice what a step needs.");
  schema.add("reproducible", train.reproducible,
             "Compute bit-identical results on 1, 2, 4, 8, ... ranks. Slower.");
  schema.add("time_products", train.time_products,
             "On CUDA, time the algorithms that cuBLAS proposes for each product, and use the "
             "fastest; last bits then differ from run to run. false: cuBLAS's choice. Not with "
             "train.reproducible.");
  schema.add("threads", train.threads,
             "CPU threads per rank; 0 uses the rank's cores, or 1 thread with train.reproducible.",
             kFromZero);
  schema.add("eval_every", train.eval_every,
             "Steps between validations; 0 validates only after the last step.", kFromZero);
  schema.add("eval_first", train.eval_first,
             "Validate before the first step, as step 0. auto: true if the run starts with the "
             "weights of model.path or of checkpoint.load model.");
  schema.add("eval_tokens", train.eval_tokens,
             "Tokens per validation, spread evenly over the validation data; 0 uses all of them. "
             "An example with prompt and completion counts as train.seq_len tokens.",
             kFromZero);
  schema.add("freeze", train.freeze,
             "Parameters that are not trained: patterns for their names, such as embed.* or "
             "blocks.[0-5].*, separated by commas. Frozen parameters have no gradient, no "
             "optimizer state and no weight decay. Empty: all are trained.");
  schema.add("log_every", train.log_every, "Steps between progress lines.", kFromOne);
  schema.add_choice("device", train.device, {"auto", "cpu", "cuda"},
                    "Device to train on. auto: this rank's GPU if there is one, else the CPU.");
  schema.add(
      "verify_every", train.verify_every,
      "Steps between comparisons of the state that several ranks hold: one checksum for each "
      "tensor of parameters and optimizer state. State is also compared before a checkpoint "
      "is saved. 0 disables both.",
      kFromZero);
  schema.add_choice(
      "on_corruption", train.on_corruption, {"stop", "repair"},
      "What to do when ranks hold different bits. stop: end the run and name the rank "
      "that differs from the majority. repair: copy the bits of the majority to that "
      "rank, warn and continue; without a majority, stop.");
  schema.add_choice("on_spike", train.on_spike, {"warn", "skip", "rollback", "stop"},
                    "What to do when a step's loss is a spike. skip: do not apply the update. "
                    "rollback: load the newest checkpoint and continue with the samples after the "
                    "spike. stop: end the run.");
  schema.add("spike_factor", train.spike_factor,
             "A loss is a spike if it exceeds this factor times the median of the last 32 losses "
             "that were none.",
             {.min = 1, .above_min = true});
  schema.add_choice(
      "on_nonfinite", train.on_nonfinite, {"skip", "rollback", "stop"},
      "What to do when gradients are infinite or NaN, also when the step is computed a second "
      "time. skip: do not apply the update; 10 such steps in a row end the run. rollback and stop: "
      "as train.on_spike.");
}

void add_optim(Schema& schema, OptimConfig& optim) {
  schema.section("optim", "Optimizer");
  schema.add_choice("name", optim.name, {"adamw", "sgd"}, "Optimizer.");
  schema.add("lr", optim.lr, "Peak learning rate; must be above 0.", kFromZero);
  schema.add("betas", optim.betas, "AdamW only: decay rates of the first and second moment.",
             kBelowOne);
  schema.add("eps", optim.eps, "AdamW only: epsilon, added to the denominator.", kAboveZero);
  schema.add_choice("moments", optim.moments, {"float32", "bfloat16"},
                    "AdamW only: type of the two moments. bfloat16 takes 2 bytes each instead of "
                    "4, and is rounded stochastically.");
  schema.add("momentum", optim.momentum, "SGD only: momentum; 0 disables it.", kBelowOne);
  schema.add("weight_decay", optim.weight_decay,
             "Weight decay of matrices. Biases and norms are never decayed.", kFromZero);
  schema.add("clip", optim.clip,
             "Clip the global gradient norm to this value; 0 disables clipping.", kFromZero);
  schema.add_choice("schedule", optim.schedule, {"constant", "linear", "cosine", "wsd"},
                    "Learning rate after the warm-up: constant, or decayed linearly or along a "
                    "cosine. wsd is constant and decays only in the last optim.decay_steps.");
  schema.add("warmup", optim.warmup,
             "Steps of linear warm-up. auto: a tenth of train.steps, at most 100.", kFromZero);
  schema.add("decay_steps", optim.decay_steps,
             "Steps of decay at the end of the run; 0 decays over all steps after the warm-up. "
             "Required by wsd.",
             kFromZero);
  schema.add("min_lr_ratio", optim.min_lr_ratio, "Final learning rate as a fraction of optim.lr.",
             {.min = 0, .max = 1});
}

// Two orders have a name besides their spelling.
void add_order(Schema& schema, layout::Order& order) {
  Option option{
      .type = OptionType::choice,
      .help =
          "Order of the parallel axes over the ranks, slowest axis first. pp_fastest is dp-tp-pp. "
          "tp_fastest is pp-dp-tp, which keeps tensor parallelism inside a host.",
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
  schema.section("parallel", "Parallelism");
  schema.add("auto", parallel.automatic,
             "With -n, let the planner choose what of the layout is not set: docs/planning.md.");
  schema.add("try", parallel.attempts,
             "Layouts of parallel.auto that are tried for eight steps each; 0 tries none.",
             kFromZero);
  schema.add("dp", parallel.dp, "Data-parallel size; 0 uses the number of ranks / (tp x pp x cp).",
             kFromZero);
  schema.add("tp", parallel.tp,
             "Tensor-parallel size: ranks that each weight matrix is split over.", kFromOne);
  schema.add("sequence_parallel", parallel.sequence_parallel,
             "Split the sequence over the tensor-parallel ranks outside of matrix products, which "
             "saves activation memory.");
  schema.add("pp", parallel.pp, "Pipeline-parallel size: ranks that the layers are split over.",
             kFromOne);
  schema.add("cp", parallel.cp,
             "Context-parallel size: ranks that the tokens of each row are split over; "
             "train.seq_len must be a multiple of twice that.",
             kFromOne);
  schema.add_choice("context", parallel.context, {"gather", "ring"},
                    "With parallel.cp: how attention gets the keys and values of the other ranks. "
                    "gather: all at once. ring: those of one rank at a time, while it computes. "
                    "auto: ring from 2048 tokens of a row on each rank.");
  add_order(schema, parallel.order);
  schema.add_choice("shard", parallel.shard, names_up_to(layout::ShardingStrategy::hybrid_shard),
                    "State that is sharded over the data-parallel ranks. none: nothing. optimizer: "
                    "optimizer state. grad_op: gradients and optimizer state; parameters stay "
                    "gathered from forward to backward. full: parameters, gradients and optimizer "
                    "state. hybrid: full inside groups of ranks, replicated between the groups.");
  schema.add("shard_size", parallel.shard_size,
             "Consecutive ranks in each sharding group of hybrid; 0 uses the ranks of a host.",
             kFromZero);
  schema.add_choice(
      "shard_granularity", parallel.shard_granularity,
      names_up_to(layout::ShardGranularity::tensors),
      "Unit of sharding. rows: each tensor is split by rows into nearly equal shards. "
      "tensors: each tensor belongs to one rank, in turn.");
  schema.add_choice("schedule", parallel.schedule, names_up_to(layout::PipelineSchedule::file),
                    "Pipeline schedule; `lockstep schedule` draws it. auto: interleaved with more "
                    "than one chunk, else 1f1b.");
  schema.add("chunks", parallel.chunks, "Pipeline stages per rank.", kFromOne);
  schema.add("group", parallel.group,
             "interleaved and zb-1p only: consecutive micro-batches that a stage runs before its "
             "rank switches to the next stage; 0 uses parallel.pp.",
             kFromZero);
  schema.add("split", parallel.split,
             "Layers of each stage, from first to last; the embedding and the head count as one "
             "layer each. An empty list splits the blocks evenly.");
  schema.add("schedule_file", parallel.schedule_file,
             "CSV file with the schedule, in the format of `lockstep schedule`; used by "
             "parallel.schedule file.");

  schema.section("memory", "Memory");
  schema.add_choice(
      "strategy", config.memory.strategy, names_up_to(layout::MemoryStrategy::extreme),
      "Activation memory. basic: store all activations. standard: selective recomputation. "
      "aggressive: full recomputation. extreme: full recomputation, and the block inputs are "
      "stored on disk. With train.recompute none, extreme stores all activations on disk.");
  schema.add_bytes("max_per_device", config.memory.max_per_device,
                   "Memory limit per rank, such as 8GB. Parameters, gradients and optimizer state "
                   "must fit, and libtorch's allocator enforces it. 0 sets no limit.");

  schema.add_choice("store", config.memory.store, {"disk", "host"},
                    "Where memory.strategy extreme stores activations: in a file in memory.disk, "
                    "or, for a GPU, in pinned host memory.");
  schema.add("disk", config.memory.disk,
             "Folder where memory.strategy extreme stores activations; use a fast local disk. "
             "Empty: TMPDIR, or /tmp.");

  schema.section("comm", "Communication");
  schema.add_choice("backend", config.comm.backend, {"auto", "shm", "mpi", "gloo", "nccl"},
                    "Communication backend. auto: the fastest backend that connects all ranks.");
  schema.add_choice("strategy", config.comm.strategy, names_up_to(layout::CommStrategy::adaptive),
                    "All-reduce algorithm: the backend's own, hierarchical (inside each host "
                    "first), ring, tree, or adaptive (by message size, from a measured table).");
  schema.add_choice(
      "compression", config.comm.compression,
      {"none", "fp16", "bf16", "power-sgd", "fp16-across-hosts", "bf16-across-hosts"},
      "Gradient compression, for parallel.shard none. fp16, bf16: send 16-bit floats. power-sgd: "
      "send low-rank factors. fp16-across-hosts, bf16-across-hosts: send 16-bit floats between "
      "hosts and full precision inside a host.");
  schema.add("timeout", config.comm.timeout,
             "Timeout of a collective, in seconds; 0 uses LOCKSTEP_TIMEOUT, or 30.",
             {.min = 0, .max = 604800});
}

// One codec for all state, or one for each kind of it.
Option codec_option(layout::StateCodecs& codecs) {
  Option option{
      .type = OptionType::text,
      .help =
          "Encoding of offloaded optimizer state: none, fp16 (second moment bf16), bf16, int8 "
          "(second moment quantization), quantization (8 bits, finer near zero) or lossless (LZ4). "
          "Name each kind to encode it separately: exp_avg=bf16,exp_avg_sq=quantization. "
          "Parameters and gradients in host memory can be encoded too: "
          "quantization,params=int8,grads=bf16 (params: bf16, int8, quantization or lossless; "
          "grads: "
          "bf16 or lossless)."};
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
  schema.section("offload", "Offload to host memory and disk");
  schema.add("params", offload.params, "Allow parameters to be offloaded to host memory.");
  schema.add("grads", offload.grads, "Allow gradients to be offloaded to host memory.");
  schema.add("optimizer", offload.optimizer,
             "Allow optimizer state to be offloaded to host memory.");
  schema.add_bytes("param_budget", offload.param_budget,
                   "Device memory for parameters, including gathered ones. 0 uses the smallest of "
                   "2GB, the device's memory and offload.device_limit.");
  schema.add_bytes("host_budget", offload.host_budget,
                   "Host memory that a rank may use for offloaded data. 0 uses the smallest of "
                   "32GB, the host's memory and offload.host_limit.");
  schema.add_bytes("device_limit", offload.device_limit,
                   "Device memory that the thresholds of offload.strategy refer to: parameters, "
                   "gradients, optimizer state, transfers in flight and, after the first step, "
                   "activations. 0 uses the smaller of 8GB and the device's memory.");
  schema.add_bytes(
      "host_limit", offload.advanced.host_limit,
      "The same limit for host memory. 0 uses the smaller of 64GB and the host's memory.");
  schema.add("prefetch", offload.advanced.prefetch,
             "Number of parameters to fetch before they are used.", kFromOne);
  schema.add("async_prefetch", offload.advanced.async_prefetch,
             "Fetch parameters concurrently with the computation.");
  schema.add("pin", offload.advanced.pin,
             "Use pinned host memory. auto: true when training on a GPU.");
  schema.add("overlap", offload.advanced.overlap,
             "Overlap transfers and optimizer updates with the computation.");
  schema.add_option("codec", codec_option(offload.codec));
  schema.add_choice("strategy", offload.advanced.strategy,
                    names_up_to(layout::OffloadStrategy::extreme),
                    "When offloading starts, and how much is offloaded. Beyond 0.9, 0.75, 0.6 or "
                    "0.4 of offload.device_limit, offload 20, 50, 80 or 100 % of that memory.");
  schema.add("disk", offload.disk,
             "Folder for optimizer state that exceeds offload.host_budget. Empty: no disk tier.");
  schema.add_choice("update_site", offload.advanced.update_site,
                    names_up_to(layout::UpdateSite::device),
                    "Where the optimizer step runs. auto: the faster one in a short measurement.");
  schema.add_choice(
      "clip_mode", offload.advanced.clip_mode, names_up_to(layout::ClipMode::none),
      "exact: clip by the global gradient norm, after the backward pass. none: update each "
      "parameter during the backward pass, without clipping (needs optim.clip 0).");
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
  for (const auto& [alias, name] : kAliases) schema.alias(std::string(name), std::string(alias));
  for (const auto& [other, name] : kElsewhere)
    schema.suggest(std::string(name), std::string(other));
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
