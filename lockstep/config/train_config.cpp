// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/train_config.h"

#include <algorithm>
#include <limits>

#include "lockstep/config/offload_rules.h"
#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"

namespace lockstep::config {
namespace {

void validate_layout(const TrainConfig& config, int world) {
  const LayoutConfig& parallel = config.parallel;
  require(world >= 1, format("{} ranks, must be at least 1", world));
  const int64_t others = int64_t{parallel.tp} * parallel.pp * parallel.cp;
  const std::string with_cp = parallel.cp > 1 ? format(" x parallel.cp {}", parallel.cp) : "";
  if (parallel.dp == 0) {
    require(world % others == 0,
            format("{} must be divisible by parallel.tp {} x parallel.pp {}{} = {}",
                   counted(world, "rank"), parallel.tp, parallel.pp, with_cp, others));
  } else {
    const int64_t product =
        layout::ParallelDims{parallel.dp, parallel.tp, parallel.pp}.world_size();
    require(product <= world && product * parallel.cp == world,
            format("parallel.dp {} x tp {} x pp {}{} = {}, must equal the {} that {} started; "
                   "parallel.dp 0 takes what there is",
                   parallel.dp, parallel.tp, parallel.pp, with_cp, product * parallel.cp,
                   counted(world, "rank"), world == 1 ? "is" : "are"));
  }
  validate_context(config);
  if (parallel.shard_size > 0) {
    require(parallel.shard == layout::ShardingStrategy::hybrid_shard,
            format("parallel.shard_size is {}, but parallel.shard is {}: it is for hybrid",
                   parallel.shard_size, name_of(parallel.shard)));
    const int ranks = config.dims(world).dp;
    require(ranks % parallel.shard_size == 0,
            format("parallel.shard_size {} must divide the {} data-parallel ranks",
                   parallel.shard_size, ranks));
  }
  require(parallel.shard_granularity == layout::ShardGranularity::rows ||
              parallel.shard != layout::ShardingStrategy::no_shard,
          format("parallel.shard_granularity is {}, but parallel.shard is none: ranks share "
                 "nothing, so leave it out or set parallel.shard",
                 name_of(parallel.shard_granularity)));
}

void validate_batch(const TrainConfig& config, int world) {
  const RunConfig& train = config.train;
  const int dp = config.dp(world);
  require(train.micro_batch <= std::numeric_limits<int>::max() / dp &&
              train.global_batch <= std::numeric_limits<int>::max(),
          format("train.micro_batch {} x dp {} and train.global_batch {} must be below 2^31",
                 train.micro_batch, dp, train.global_batch));
  if (train.global_batch == 0) return;
  const int64_t micro_batches = train.global_batch / train.micro_batch;
  const int64_t below = micro_batches * train.micro_batch;
  require(train.global_batch % train.micro_batch == 0,
          format("train.global_batch is {}, must be a multiple of train.micro_batch {}: {}{}",
                 train.global_batch, train.micro_batch, below > 0 ? format("{} or ", below) : "",
                 below + train.micro_batch));
  require(micro_batches >= dp,
          format("train.global_batch {} / train.micro_batch {} = {}, must be at least {}, one "
                 "micro-batch for each data-parallel rank: use train.global_batch {}, a smaller "
                 "train.micro_batch or fewer ranks",
                 train.global_batch, train.micro_batch, micro_batches, dp, train.micro_batch * dp));
}

void validate_schedule(const TrainConfig& config) {
  const OptimConfig& optim = config.optim;
  const int64_t steps = config.train.steps, warmup = config.warmup();
  require(warmup <= steps,
          format("optim.warmup is {}, must be at most train.steps {}", warmup, steps));
  if (optim.schedule == "constant") return;
  require(
      warmup < steps,
      format("optim.warmup is {}, must be below train.steps {}: the {} schedule begins after it",
             warmup, steps, optim.schedule));
  require(optim.decay_steps <= steps - warmup,
          format("optim.decay_steps is {}, must be at most {}: train.steps {} - warm-up {}",
                 optim.decay_steps, steps - warmup, steps, warmup));
  require(optim.schedule != "wsd" || optim.decay_steps > 0,
          format("optim.decay_steps is 0, must be at least 1 for wsd; a fifth of the steps, {}, is "
                 "usual",
                 std::max<int64_t>(1, steps / 5)));
}

void validate_optimizer(const OptimConfig& optim) {
  require(optim.lr > 0,
          format("optim.lr is {}, must be greater than 0: nothing is trained with it", optim.lr));
  require(optim.betas.size() == 2,
          format("optim.betas has {} numbers, must have 2", optim.betas.size()));
  require(optim.momentum == 0 || optim.name == OptimizerKind::sgd,
          format("optim.momentum is {}, must be 0 for adamw, which has betas", optim.momentum));
  require(optim.moments == Precision::float32 || optim.name == OptimizerKind::adamw,
          "optim.moments is bfloat16, must be float32 for optim.name sgd: it is for the moments of "
          "adamw");
}

void validate_data(const TrainConfig& config) {
  const DataConfig& data = config.data;
  require(!data.path.empty(), "data.path is empty, must name a text or token file to train on");
  require(!data.tokenizer.empty(), "data.tokenizer is empty, must be bytes or a tokenizer file");
  require(!data.validation.empty(), "data.validation is empty, must be a fraction or a file");
  const auto fraction = data.validation_fraction();
  if (!fraction) return;
  require(*fraction >= 0 && *fraction <= 0.5,
          format("data.validation is {}, must be at least 0 and at most 0.5, or a file",
                 data.validation));
  require(*fraction > 0 || config.train.eval_every == 0,
          format("train.eval_every is {}, but data.validation is 0: nothing is left to measure on",
                 config.train.eval_every));
  require(*fraction > 0 || !config.train.eval_first.value_or(false),
          "train.eval_first is true, but data.validation is 0: nothing is left to measure on");
}

void validate_compression(const TrainConfig& config) {
  const std::string& compression = config.comm.compression;
  if (compression == "none") return;
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(format("comm.compression is {}, but {}", compression, what));
  };
  if (config.parallel.shard != layout::ShardingStrategy::no_shard)
    refuse(format("parallel.shard is {}: it is for none", name_of(config.parallel.shard)));
  if (config.offload.any()) refuse("state is offloaded: it is for whole models on the device");
  if (config.train.reproducible)
    refuse("train.reproducible is true: rounded gradients depend on the layout");
  if (config.parallel.chunks > 1)
    refuse(format("parallel.chunks is {}: it is for one stage of a rank", config.parallel.chunks));
}

void validate_bad_steps(const TrainConfig& config) {
  const RunConfig& train = config.train;
  const CheckpointConfig& checkpoint = config.checkpoint;
  const bool saves = checkpoint.dir == "auto" ? !config.run.dir.empty() : !checkpoint.dir.empty();
  const char* const rolls_back = train.on_spike == OnSpike::rollback ? "train.on_spike"
                                 : train.on_nonfinite == OnNonfinite::rollback
                                     ? "train.on_nonfinite"
                                     : nullptr;
  require(
      rolls_back == nullptr || (saves && checkpoint.every > 0),
      format("{} is rollback, but checkpoint.every is {} and the folder for checkpoints is {}: "
             "there is nothing to load; set checkpoint.every, and checkpoint.dir or run.dir",
             rolls_back != nullptr ? rolls_back : "", checkpoint.every, saves ? "set" : "empty"));
  require(
      train.on_spike != OnSpike::skip || !config.offload.any() ||
          config.offload.advanced.clip_mode != layout::ClipMode::none,
      "train.on_spike is skip, but offload.clip_mode is none: parameters are updated during the "
      "backward pass, before the loss of the step is known");
}

void validate_elastic(const RunFolderConfig& run) {
  require(run.min_ranks <= run.ranks || run.ranks == 0,
          format("run.min_ranks is {}, must be at most run.ranks {}", run.min_ranks, run.ranks));
}

void validate_output(const TrainConfig& config) {
  require(config.metrics.trace != "auto" || !config.run.dir.empty(),
          "metrics.trace is auto, but run.dir is empty: name a folder for traces");
  require(config.metrics.tensorboard != "auto" || !config.run.dir.empty(),
          "metrics.tensorboard is auto, but run.dir is empty: name a folder for event files");
  require(config.metrics.health_every == 0 || !config.offload.any(),
          format("metrics.health_every is {}, but offload is on: gradients and weights are not in "
                 "memory together; set metrics.health_every 0",
                 config.metrics.health_every));
  for (const auto& [name, value] : {std::pair("health_every", config.metrics.health_every),
                                    {"sample_tokens", config.metrics.sample_tokens}}) {
    require(value == 0 || !config.run.dir.empty(),
            format("metrics.{} is {}, but run.dir is empty: events.jsonl, which it is written to, "
                   "is in the run folder",
                   name, value));
  }
  const CheckpointConfig& checkpoint = config.checkpoint;
  const bool saves = checkpoint.dir == "auto" ? !config.run.dir.empty() : !checkpoint.dir.empty();
  require(!checkpoint.best || saves,
          "checkpoint.best is true, but there is no folder for checkpoints; set checkpoint.dir or "
          "run.dir");
  require(!checkpoint.best || config.train.eval_every > 0,
          "checkpoint.best is true, but train.eval_every is 0, so that only the last step is "
          "validated; set train.eval_every to at least 1");
  require(!checkpoint.resume.empty(), "checkpoint.resume is empty, must be none, auto or a path");
  const bool from_path = checkpoint.resume != "none" && checkpoint.resume != "auto";
  require(checkpoint.load == LoadWhat::all || from_path,
          format("checkpoint.load is model, but checkpoint.resume is {}: it must be the path of a "
                 "checkpoint to begin with",
                 checkpoint.resume));
  require(!checkpoint.partial || checkpoint.resume != "none",
          "checkpoint.partial is true, but checkpoint.resume is none: nothing is loaded");
  require(checkpoint.when_busy == WhenBusy::wait || checkpoint.async,
          "checkpoint.when_busy is skip, but checkpoint.async is false: no checkpoint is written "
          "concurrently with the "
          "training");
  const bool nowhere = checkpoint.dir == "auto" && config.run.dir.empty();
  if (!checkpoint.dir.empty() && !nowhere) return;
  const char* const empty = nowhere ? "run.dir" : "checkpoint.dir";
  require(!checkpoint.async, format("checkpoint.async is true, but {} is empty", empty));
  require(checkpoint.every == 0,
          format("checkpoint.every is {}, but {} is empty", checkpoint.every, empty));
  require(checkpoint.resume != "auto", format("checkpoint.resume is auto, but {} is empty", empty));
}

}  // namespace

std::optional<double> DataConfig::validation_fraction() const { return parse_number(validation); }

void validate_context(const TrainConfig& config) {
  const int64_t cp = config.parallel.cp, length = config.train.seq_len;
  if (cp == 1) {
    require(!config.parallel.context,
            format("parallel.context is {}, but parallel.cp is 1: leave it out",
                   config.attends_in_ring() ? "ring" : "gather"));
    return;
  }
  require(length % (2 * cp) == 0,
          format("train.seq_len is {}, must be a multiple of 2 x parallel.cp = {}: {}", length,
                 2 * cp, (length / (2 * cp) + 1) * 2 * cp));
}

void TrainConfig::validate(int world) const {
  TrainConfig copy = *this;
  train_schema(copy).check();
  validate_layout(*this, world);
  // A folder's sizes are checked when it is read.
  if (model_path.empty()) {
    model.validate();
    require(model.positions == 0 || train.seq_len <= model.positions,
            format("train.seq_len is {}, must be at most model.positions {}; set --seq-len to at "
                   "most that",
                   train.seq_len, model.positions));
    validate_tensor(*this, model);
  }
  validate_data(*this);
  validate_batch(*this, world);
  validate_pipeline(*this, world);
  require(memory.disk.empty() || memory.strategy == layout::MemoryStrategy::extreme,
          format("memory.disk is {}, but memory.strategy is {}: it is for extreme", memory.disk,
                 layout::name_of(memory.strategy)));
  require(
      memory.store == ActivationStore::disk || memory.strategy == layout::MemoryStrategy::extreme,
      format("memory.store is host, but memory.strategy is {}: it is for extreme",
             layout::name_of(memory.strategy)));
  require(
      memory.store == ActivationStore::disk || memory.disk.empty(),
      format("memory.disk is {}, but memory.store is host: leave one of them out", memory.disk));
  require(!train.fit || memory.strategy != layout::MemoryStrategy::extreme,
          "train.recompute is fit, but memory.strategy extreme stores activations on disk; use "
          "another memory.strategy");
  if (model_path.empty() && is_pipelined(parallel)) layers_per_stage(parallel, model.layers);
  validate_optimizer(optim);
  validate_schedule(*this);
  validate_offload(*this);
  validate_compression(*this);
  require(comm.backend != "nccl" || comm.strategy == layout::CommStrategy::all_reduce,
          format("comm.strategy is {}, but comm.backend is nccl, which chooses between rings and "
                 "trees for tensors on GPUs itself: leave it out, or use another backend",
                 layout::name_of(comm.strategy)));
  require_graphs(train.device != DeviceKind::cpu);
  validate_bad_steps(*this);
  validate_elastic(run);
  validate_output(*this);
}

std::string TrainConfig::graphs_obstacle(bool has_examples) const {
  if (parallel.tp > 1)
    return format("parallel.tp is {}, whose ranks communicate in each layer", parallel.tp);
  if (parallel.cp > 1)
    return format("parallel.cp is {}, whose ranks communicate in each layer", parallel.cp);
  if (parallel.pp > 1 || parallel.chunks > 1)
    return format("parallel.pp is {} with {} chunks, whose stages wait for each other", parallel.pp,
                  parallel.chunks);
  if (parallel.shard != layout::ShardingStrategy::no_shard)
    return format("parallel.shard is {}, whose ranks gather each layer",
                  layout::name_of(parallel.shard));
  if (offload.any()) return "state is offloaded, and moves during the step";
  if (memory.strategy == layout::MemoryStrategy::extreme)
    return "memory.strategy is extreme, and activations move during the step";
  if (train.reproducible) return "train.reproducible is true, which sums gradients on demand";
  if (model.dropout > 0)
    return format("model.dropout is {}, which draws new numbers in each step", model.dropout);
  if (data.pack) return "data.pack is true: documents have other lengths in each row";
  if (has_examples) return "examples of the data have other lengths in each row";
  return "";
}

void TrainConfig::require_graphs(bool on_gpu, bool has_examples) const {
  if (train.graphs != Graphs::on) return;
  const std::string obstacle =
      on_gpu ? graphs_obstacle(has_examples) : "the training is on the CPU";
  if (obstacle.empty()) return;
  throw ConfigError(
      format("train.graphs is on, but {}; set train.graphs auto, or change that", obstacle));
}

layout::ParallelDims TrainConfig::dims(int world) const {
  const int others = parallel.tp * parallel.pp;
  return {parallel.dp > 0 ? parallel.dp * parallel.cp : world / others, parallel.tp, parallel.pp};
}

std::string TrainConfig::describe_dims(int world) const {
  std::string text = layout::ParallelDims{dp(world), parallel.tp, parallel.pp}.describe();
  if (parallel.cp == 1) return text;
  return format("{} x cp {} ({})", text, parallel.cp, attends_in_ring() ? "ring" : "gather");
}

int64_t TrainConfig::tile() const {
  if (train.tile) return *train.tile;
  if (train.found_tile) return *train.found_tile;
  const int64_t tokens =
      train.seq_len / parallel.cp / (parallel.sequence_parallel ? parallel.tp : 1);
  return tokens >= kLongRow ? kLongTile : 0;
}

TrainConfig::ContextPlace TrainConfig::context_place(int dp_rank, int world) const {
  if (train.reproducible) return {dp_rank % dp(world), dp_rank / dp(world)};
  return {dp_rank / parallel.cp, dp_rank % parallel.cp};
}

bool TrainConfig::attends_in_ring() const {
  if (parallel.context) return *parallel.context == ContextKind::ring;
  return train.seq_len / parallel.cp >= kRingTokens;
}

int64_t TrainConfig::global_batch(int world) const {
  return train.global_batch > 0 ? train.global_batch : train.micro_batch * dp(world);
}

int TrainConfig::accumulation(int world) const {
  const int64_t at_once = train.micro_batch * dp(world);
  return static_cast<int>((global_batch(world) + at_once - 1) / at_once);
}

layout::OffloadOptions TrainConfig::offload_options() const {
  layout::OffloadOptions options = offload;
  options.advanced.update_rule = optim.name == OptimizerKind::adamw ? layout::UpdateRule::adamw
                                 : optim.momentum > 0 ? layout::UpdateRule::sgd_momentum
                                                      : layout::UpdateRule::sgd;
  return options;
}

layout::Recompute TrainConfig::recompute() const {
  if (train.fit) {
    return train.fit->full > 0        ? layout::Recompute::full
           : train.fit->selective > 0 ? layout::Recompute::selective
                                      : layout::Recompute::none;
  }
  return train.recompute.value_or(layout::ParallelConfig{.memory = memory.strategy}.recompute());
}

// Spread evenly, so that every stage of a pipeline has its part.
layout::Recompute TrainConfig::recompute_of(int64_t block) const {
  if (!train.fit) return recompute();
  // Of `all` in a row, `some` are chosen: is the i-th?
  const auto is_chosen = [](int64_t i, int64_t some, int64_t all) {
    return (i + 1) * some / all > i * some / all;
  };
  const int64_t again = train.fit->selective + train.fit->full;
  if (!is_chosen(block, again, model.layers)) return layout::Recompute::none;
  return is_chosen(block * again / model.layers, train.fit->full, again)
             ? layout::Recompute::full
             : layout::Recompute::selective;
}

bool TrainConfig::evaluates_first() const {
  return train.eval_first.value_or(!model_path.empty() || checkpoint.load == LoadWhat::model);
}

int64_t TrainConfig::warmup() const {
  return optim.warmup.value_or(std::min<int64_t>(100, train.steps / 10));
}

int TrainConfig::threads(int cores_per_rank) const {
  if (train.threads > 0) return train.threads;
  return train.reproducible ? 1 : std::max(1, cores_per_rank);
}

milliseconds TrainConfig::timeout() const {
  return milliseconds{static_cast<int64_t>(comm.timeout * 1000)};
}

}  // namespace lockstep::config
