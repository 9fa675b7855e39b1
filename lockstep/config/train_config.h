// SPDX-License-Identifier: Apache-2.0
// Everything that decides a training run. Keys of files and flags are the names below:
// [train] steps is --train.steps is TrainConfig::train.steps. docs/configuration.md has them all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/schema/schema.h"
#include "lockstep/core/clock.h"
#include "lockstep/layout/offload.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/layout/rank_map.h"

namespace lockstep::config {

enum class Precision { float32, bfloat16, fp8 };
// Products of blocks with a smaller size are not computed in 8 bits: casts would cost more.
constexpr int64_t kFp8Min = 512;
enum class DeviceKind { automatic, cpu, cuda };
enum class OptimizerKind { adamw, sgd };
// Of a checkpoint that a run begins from.
enum class LoadWhat { all, model };
// A checkpoint is due while the one before is still being written.
enum class WhenBusy { wait, skip };
// Ranks that must hold the same bits do not.
enum class OnCorruption { stop, repair };
// A step whose loss is far above those before, and one whose gradients are not finite.
enum class OnSpike { warn, skip, rollback, stop };
enum class OnNonfinite { skip, rollback, stop };
// Whether steps are repeated as CUDA graphs. Not set: where they can be, and memory allows it.
enum class Graphs { on, off };
// What restarted ranks continue from.
enum class Recovery { checkpoint, memory };

// How ranks that share rows attend: with the keys and values of all, or of one after the other.
enum class ContextKind { gather, ring };
// Tokens of a rank from which a ring is faster.
constexpr int64_t kRingTokens = 2048;

struct DataConfig {
  std::string path = {};            // text, token or JSON-lines files
  std::string tokenizer = "auto";   // bytes, or a tokenizer.json; auto: see tokenizer_name()
  std::string validation = "0.05";  // a fraction of the data, or a path
  bool pack = false;                // whole documents, or examples, in rows

  // None: `validation` is a path.
  std::optional<double> validation_fraction() const;
  bool operator==(const DataConfig&) const = default;
};

// How many blocks of a model recompute a part of their activations, and how many all. The others
// keep theirs.
struct RecomputedBlocks {
  int64_t selective = 0, full = 0;

  bool operator==(const RecomputedBlocks&) const = default;
};

struct RunConfig {
  int64_t steps = 1000, seq_len = 256, micro_batch = 8;
  int64_t global_batch = 0;  // 0: micro_batch x dp
  int64_t seed = 1;
  // Not set: what the other one says, or float32. fp8 is a precision, not a type of tensors.
  std::optional<Precision> precision = std::nullopt, dtype = std::nullopt;
  std::optional<int64_t> fp8_min = std::nullopt;              // not set: kFp8Min
  std::optional<layout::Recompute> recompute = std::nullopt;  // not set: memory.strategy decides
  std::optional<RecomputedBlocks> fit = std::nullopt;  // set: as many as fit_to_memory() has found
  // Tokens that MLP, norms and loss compute at once; 0: all. Not set: TrainConfig::tile().
  std::optional<int64_t> tile = std::nullopt;
  std::optional<int64_t> found_tile = std::nullopt;  // where it is not set, by fit_to_memory()
  std::optional<Graphs> graphs = std::nullopt;
  bool reproducible = false;
  bool time_products = true;                      // unless reproducible
  int threads = 0;                                // 0: cores per rank; 1 if reproducible
  int64_t eval_every = 0, log_every = 10;         // 0: at the end only
  std::optional<bool> eval_first = std::nullopt;  // not set: where weights are loaded
  int64_t eval_tokens = 1 << 18;                  // of the validation data; 0: all
  std::string freeze = {};                        // patterns for names, separated by commas
  DeviceKind device = DeviceKind::automatic;
  int64_t verify_every = 4;  // steps between votes on replicated state; 0: never
  OnCorruption on_corruption = OnCorruption::stop;
  OnSpike on_spike = OnSpike::warn;
  double spike_factor = 10;  // times the median of the last losses
  OnNonfinite on_nonfinite = OnNonfinite::skip;

  // Of weights, and of activations that are not in 8 bits: float32 or bfloat16.
  Precision type() const {
    const Precision wide = precision.value_or(Precision::float32);
    return dtype.value_or(wide == Precision::float32 ? wide : Precision::bfloat16);
  }
  bool is_fp8() const { return precision == Precision::fp8; }
  bool operator==(const RunConfig&) const = default;
};

struct OptimConfig {
  OptimizerKind name = OptimizerKind::adamw;
  double lr = 1e-3;
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  Precision moments = Precision::float32;  // or bfloat16, rounded stochastically
  double momentum = 0;
  double weight_decay = 0.1;
  double clip = 1;                               // 0: off
  std::string schedule = "cosine";               // a name that optim::parse_schedule knows
  std::optional<int64_t> warmup = std::nullopt;  // not set: a tenth of the steps, at most 100
  int64_t decay_steps = 0;                       // 0: all after the warm-up
  double min_lr_ratio = 0.1;

  bool operator==(const OptimConfig&) const = default;
};

struct LayoutConfig {
  bool automatic = false;  // auto: the planner chooses what is not set
  int attempts = 0;        // try: layouts of the planner that are tried for a few steps
  int dp = 0;              // 0: what tp, pp and cp leave
  int tp = 1, pp = 1;
  int cp = 1;                                         // ranks that share the tokens of each row
  std::optional<ContextKind> context = std::nullopt;  // not set: TrainConfig::attends_in_ring()
  layout::Order order = layout::Order::pp_fastest;
  bool sequence_parallel = false;  // tp ranks share the sequence where they do not share matrices
  layout::ShardingStrategy shard = layout::ShardingStrategy::no_shard;
  int shard_size = 0;  // hybrid: ranks that share; 0: those of a host
  layout::ShardGranularity shard_granularity = layout::ShardGranularity::rows;
  // Not set: 1f1b, or interleaved where there are chunks.
  std::optional<layout::PipelineSchedule> schedule = std::nullopt;
  int chunks = 1;                  // stages of a rank
  int group = 0;                   // interleaved: micro-batches a chunk takes in turn; 0: pp
  std::vector<double> split = {};  // layers of each stage; empty: equal shares
  std::string schedule_file = {};  // for PipelineSchedule::file

  bool operator==(const LayoutConfig&) const = default;
};

// Tokens of a row on a rank from which train.tile auto computes so many at once, unless all fit.
constexpr int64_t kLongRow = 16384, kLongTile = 4096;
// Where activations are while they are not in the memory of the device.
enum class ActivationStore { disk, host };

struct MemoryConfig {
  layout::MemoryStrategy strategy = layout::MemoryStrategy::basic;
  int64_t max_per_device = 0;                     // bytes; 0: no limit
  ActivationStore store = ActivationStore::disk;  // extreme: of activations
  std::string disk = {};  // extreme: the folder for activations; empty: TMPDIR, or /tmp

  bool operator==(const MemoryConfig&) const = default;
};

struct CommConfig {
  std::string backend = "auto";  // a name that comm::init knows
  layout::CommStrategy strategy = layout::CommStrategy::all_reduce;
  std::string compression = "none";  // of gradients: a name that parallel::hooks knows
  double timeout = 0;                // seconds; 0: LOCKSTEP_TIMEOUT, or 30

  bool operator==(const CommConfig&) const = default;
};

struct CheckpointConfig {
  std::string dir = "auto";     // auto: checkpoints in run.dir; empty: none is written
  int64_t every = 0;            // 0: at the end only
  int64_t keep = 3;             // the newest; 0: all
  bool best = false;            // that of the lowest validation loss stays too
  std::string resume = "none";  // none, auto (the newest in dir), or a path
  LoadWhat load = LoadWhat::all;
  bool partial = false;     // tensors that are missing, too many or of another shape are let pass
  bool other_data = false;  // than the checkpoint was trained on is let pass
  bool async = false;       // written concurrently with training, from a copy in memory
  WhenBusy when_busy = WhenBusy::wait;

  bool operator==(const CheckpointConfig&) const = default;
};

struct MetricsConfig {
  std::string file = "auto";     // auto: metrics.jsonl in run.dir; empty: none
  std::string trace = {};        // a folder; auto: traces in run.dir; empty: none
  std::string tensorboard = {};  // a folder; auto: tensorboard in run.dir; empty: none
  int64_t health_every = 0;      // steps; 0: never
  int64_t sample_tokens = 0;     // of the text after each validation; 0: none
  std::string sample_prompt = "The";

  bool operator==(const MetricsConfig&) const = default;
};

struct RunFolderConfig {
  std::string dir = "auto";  // auto: a new one in runs/; empty: none
  int ranks = 0;             // -n; 0: those of the launcher, or one
  int min_ranks = 0;         // -n MIN:MAX; 0: ranks
  int64_t grow_after = 60;   // seconds that a place which has failed is left out
  int max_restarts = 0;      // in an hour, with -n
  Recovery recovery = Recovery::checkpoint;
  int64_t grace = 60;  // seconds without a sign of life after a signal, with -n

  bool operator==(const RunFolderConfig&) const = default;
};

// A value, the same on every rank.
struct TrainConfig {
  ModelSpec model = {};
  std::string model_path = {};  // model.path: a Hugging Face folder to start from
  DataConfig data = {};
  RunConfig train = {};
  OptimConfig optim = {};
  LayoutConfig parallel = {};
  MemoryConfig memory = {};
  layout::OffloadOptions offload = {.params = false, .grads = false, .optimizer = false};
  CommConfig comm = {};
  CheckpointConfig checkpoint = {};
  MetricsConfig metrics = {};
  RunFolderConfig run = {};

  // Throws ConfigError for the first thing that is wrong, with the numbers and what would be right.
  // Files are not looked at.
  void validate(int world) const;

  // What is left open by zeros, once the number of ranks is known. The configuration must be valid.
  // Ranks that share rows are on the axis dp of dims: they sum gradients and share state as ranks
  // with rows of their own do. There they are neighbours or, in reproducible mode, as far from each
  // other as they can be: sums over replicas are then inside of those over the tokens of a row.
  layout::ParallelDims dims(int world) const;
  std::string describe_dims(int world) const;  // "dp 2 x tp 1 x pp 1 x cp 2 (ring)"
  struct ContextPlace {
    int replica = 0, rank = 0;  // of the ranks with rows of their own, and of those that share them
  };
  ContextPlace context_place(int dp_rank, int world) const;
  int dp(int world) const { return dims(world).dp / parallel.cp; }  // ranks with rows of their own
  bool attends_in_ring() const;                                     // where ranks share rows
  int64_t tile() const;  // tokens that are computed at once outside of attention; 0: all
  int64_t global_batch(int world) const;
  // Micro-batches of a rank in each step. The last ranks may have fewer, and compute padding in
  // their place: collectives and schedules are those of equal numbers.
  int accumulation(int world) const;
  layout::Recompute recompute() const;  // of the block that recomputes most
  layout::Recompute recompute_of(int64_t block) const;
  // What keeps steps from being recorded as CUDA graphs: the option, its value and the reason;
  // empty: nothing does. `has_examples`: the loss counts some tokens of each row.
  std::string graphs_obstacle(bool has_examples = false) const;
  // ConfigError where train.graphs is on, and steps cannot be recorded, or are not on a GPU.
  void require_graphs(bool on_gpu, bool has_examples = false) const;
  bool evaluates_first() const;  // before the first step, if there is validation data
  layout::OffloadOptions offload_options() const;  // `offload`, for the state of `optim`
  int64_t warmup() const;
  int threads(int cores_per_rank) const;
  milliseconds timeout() const;

  bool operator==(const TrainConfig&) const = default;
};

// The part of TrainConfig::validate() that is about ranks that share rows, but for their number.
void validate_context(const TrainConfig& config);

// Bound to `config`, whose present values are the defaults.
Schema train_schema(TrainConfig& config);

// The resolved configuration, for checkpoints, and back.
std::string to_json(const TrainConfig& config);
TrainConfig train_config_from_json(const std::string& text, const std::string& path);

}  // namespace lockstep::config
