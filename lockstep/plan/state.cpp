// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/state.h"

#include <algorithm>
#include <set>
#include <utility>

#include "lockstep/config/pipeline.h"
#include "lockstep/config/tensor.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/layout/offload_plan.h"
#include "lockstep/plan/gather_arena.h"

namespace lockstep::plan {
namespace {

using config::TrainConfig;
using layout::Shape;
using layout::ShardingStrategy;

int64_t aligned(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Parameters that are gathered and reduced together.
struct Unit {
  std::vector<Shape> shapes = {};
  int64_t count = 1;          // of units like this, one behind the other
  bool is_tied_copy = false;  // the optimizer has it elsewhere
  bool used_in_backward = true;
};

std::vector<Unit> units_of(const config::ModelSpec& model, const LocalTensors& tensors,
                           const Stage& stage) {
  std::vector<Unit> units;
  if (stage.embedding) {
    units.push_back({.shapes = tensors.embed, .used_in_backward = false});
    if (!tensors.positions.empty())
      units.push_back({.shapes = tensors.positions, .used_in_backward = false});
  }
  if (stage.blocks > 0) units.push_back({.shapes = tensors.block, .count = stage.blocks});
  if (stage.head) {
    units.push_back({.shapes = tensors.norm});
    if (!model.is_tied()) units.push_back({.shapes = tensors.head});
    if (model.is_tied() && !stage.embedding)
      units.push_back({.shapes = tensors.embed, .is_tied_copy = true});
  }
  return units;
}

// Copies of gradients that a SumTree of this many leaves has at most.
int64_t tree_buffers(int64_t leaves) {
  std::set<std::pair<int, int64_t>> sums;
  int64_t made = 0, spare = 0;
  for (int64_t leaf = 0; leaf < leaves; ++leaf) {
    std::pair<int, int64_t> place{0, leaf};
    while (sums.erase({place.first, place.second ^ 1}) > 0) {
      if (place.first > 0) ++spare;
      place = {place.first + 1, place.second / 2};
    }
    sums.insert(place);
    if (place.first > 0) continue;
    if (spare > 0) {
      --spare;
    } else {
      ++made;
    }
  }
  return made;
}

class Accounts {
 public:
  Accounts(const TrainConfig& config, int world)
      : config_(config),
        element_(element_bytes_of(config)),
        pipelined_(config::is_pipelined(config.parallel)),
        micro_batches_(config.accumulation(world)),
        ranks_(config.dp(world)),
        shares_(shares_of(config, world)),
        states_(static_cast<size_t>(ranks_)) {
    const bool adamw = config.optim.name == config::OptimizerKind::adamw;
    const int64_t moments = adamw ? 2 : config.optim.momentum > 0 ? 1 : 0;
    state_element_ = 4 * moments + (element_ == 2 ? 4 : 0);  // 16-bit parameters have a master
    if (!config.train.reproducible) return;
    // Without a pipeline the last micro-batch joins the sum where it is.
    leaf_copies_ = tree_buffers(pipelined_ ? micro_batches_ : micro_batches_ - 1);
  }

  int shares() const { return shares_; }

  std::vector<State> whole(const std::vector<Unit>& units) {
    // What is offloaded has lines of its own (offload_of_shares).
    const bool offloaded = config_.offload.any();
    const bool buckets = offloaded || ranks_ > 1 || config_.train.reproducible;
    // Micro-batches before the last are summed where autograd makes them.
    const bool waits = buckets && !offloaded && micro_batches_ > 1 && !config_.train.reproducible;
    State state;
    for (const Unit& unit : units) {
      for (const Shape& shape : unit.shapes) {
        const int64_t bytes = unit.count * layout::numel_of(shape) * element_;
        const int64_t gradient =
            buckets ? unit.count * aligned(bytes / unit.count, layout::kBucketAlignment) : bytes;
        state.parameters += bytes;
        state.gradients += gradient;
        state.buffers += leaf_copies_ * gradient + (waits ? bytes : 0);
        if (waits || !buckets) state.made_in_backward += bytes;
        if (!unit.is_tied_copy) state.optimizer += bytes / element_ * state_element_;
      }
    }
    states_.assign(states_.size(), state);
    return std::move(states_);
  }

  // `ends_as_it_begins`: the first unit is the last, too.
  std::vector<State> shared(const std::vector<Unit>& units, bool ends_as_it_begins) {
    Unit small;  // of all units, whole on every rank
    std::vector<Line> lines;
    for (const Unit& unit : units) {
      Unit large = unit;
      large.shapes.clear();
      for (const Shape& shape : unit.shapes) {
        if (layout::numel_of(shape) >= layout::kMinShardedElements) {
          large.shapes.push_back(shape);
        } else {
          small.shapes.insert(small.shapes.end(), static_cast<size_t>(unit.count), shape);
        }
      }
      if (!large.shapes.empty()) lines.push_back(add_shards(large));
    }
    if (!small.shapes.empty()) add_whole(small);
    if (config_.parallel.shard != ShardingStrategy::optimizer && !config_.offload.any())
      add_buffers(lines, ends_as_it_begins);
    return std::move(states_);
  }

 private:
  struct Line {
    int64_t bytes, count;
    bool used_in_backward;
  };

  layout::FlatLayout lay_out(const Unit& unit, int parts) const {
    return layout::lay_out(unit.shapes, parts, layout::kFlatAlignment / element_);
  }

  Line add_shards(const Unit& unit) {
    const layout::FlatLayout line = lay_out(unit, shares());
    const Line bytes{line.size * element_, unit.count, unit.used_in_backward};
    const bool resident = config_.parallel.shard == ShardingStrategy::optimizer;
    for (int rank = 0; rank < ranks_; ++rank) {
      State& state = states_[static_cast<size_t>(rank)];
      const auto part = static_cast<size_t>(rank % shares());
      const int64_t share = line.blocks[part].size() * element_;
      int64_t elements = 0;
      for (const layout::RowShard& rows : line.rows[part]) {
        const Shape& shape = unit.shapes[static_cast<size_t>(rows.tensor)];
        elements += rows.rows.size() * (layout::numel_of(shape) / shape[0]);
      }
      state.parameters += unit.count * (resident ? bytes.bytes : share);
      state.gradients += unit.count * (share + (resident ? bytes.bytes : 0));
      if (!unit.is_tied_copy) state.optimizer += unit.count * elements * state_element_;
      state.buffers += unit.count * leaf_copies_ * bytes.bytes;
    }
    return bytes;
  }

  void add_whole(const Unit& unit) {
    int64_t elements = 0;
    for (const Shape& shape : unit.shapes) elements += layout::numel_of(shape);
    const int64_t line = lay_out(unit, 1).size * element_;
    for (State& state : states_) {
      state.parameters += elements * element_;
      state.gradients += line;
      state.optimizer += elements * state_element_;
      state.buffers += leaf_copies_ * line;
    }
  }

  static std::vector<LineUse> uses_of(const std::vector<Line>& lines, bool ends_as_it_begins) {
    std::vector<LineUse> forward, backward;
    size_t unit = 0;
    for (const Line& line : lines) {
      for (int64_t i = 0; i < line.count; ++i, ++unit) {
        forward.push_back({unit, line.bytes});
        if (line.used_in_backward) backward.push_back(forward.back());
      }
    }
    if (ends_as_it_begins) forward.push_back(forward.front());
    forward.insert(forward.end(), backward.rbegin(), backward.rend());
    return forward;
  }

  // Lines of gathered parameters, and of gradients on their way to the shards.
  void add_buffers(const std::vector<Line>& lines, bool ends_as_it_begins) {
    if (lines.empty()) return;
    int64_t all = 0, largest = 0;
    for (const Line& line : lines) {
      all += line.count * line.bytes;
      largest = std::max(largest, line.bytes);
    }
    // A pipeline gathers a stage at a time; else the one that is used and the next.
    const bool gathers_all =
        pipelined_ || config_.parallel.shard == ShardingStrategy::shard_grad_op;
    const int64_t gathered = gathers_all ? all : gathered_bytes(uses_of(lines, ends_as_it_begins));
    // Unreduced gradients of micro-batches wait for the last one.
    const bool waits = micro_batches_ > 1 && !config_.train.reproducible;
    const int64_t reduced =
        waits ? all : std::min(all, layout::num_gradient_blocks(false, false) * largest);
    for (State& state : states_) state.buffers += gathered + reduced;
  }

  const TrainConfig& config_;
  int64_t element_, state_element_ = 0;
  bool pipelined_;
  int64_t micro_batches_;
  int ranks_, shares_;
  int64_t leaf_copies_ = 0;
  std::vector<State> states_;
};

}  // namespace

int64_t element_bytes_of(const TrainConfig& config) {
  return config.train.dtype == config::Precision::bfloat16 ? 2 : 4;
}

LocalTensors local_tensors(const config::ModelSpec& model, int tp, int rank) {
  config::ModelSpec one = model;  // blocks are alike
  one.layers = 1;
  LocalTensors tensors;
  for (const config::TensorSpec& tensor : one.tensors()) {
    auto& list = tensor.name == "embed.weight"          ? tensors.embed
                 : tensor.name == "positions.weight"    ? tensors.positions
                 : tensor.name == "head.weight"         ? tensors.head
                 : tensor.name.starts_with("blocks.0.") ? tensors.block
                                                        : tensors.norm;
    list.push_back(config::tensor_split(model, tensor, tp, rank).local_shape());
  }
  return tensors;
}

std::vector<Stage> stages_of(const TrainConfig& config, const config::ModelSpec& model) {
  if (!config::is_pipelined(config.parallel)) return {{.blocks = model.layers}};
  std::vector<Stage> stages;
  int64_t first = 0;  // layer
  for (const int layers : config::layers_per_stage(config.parallel, model.layers)) {
    const int64_t end = first + layers;
    Stage stage{.embedding = first == 0, .head = end == model.layers + 2};
    stage.blocks = layers - (stage.embedding ? 1 : 0) - (stage.head ? 1 : 0);
    stage.first_block = std::max<int64_t>(0, first - 1);
    stages.push_back(stage);
    first = end;
  }
  return stages;
}

int shares_of(const TrainConfig& config, int world) {
  const ShardingStrategy shard = config.parallel.shard;
  const int size = config.parallel.shard_size;
  if (shard == ShardingStrategy::no_shard) return 1;
  return shard == ShardingStrategy::hybrid_shard && size > 0 ? size : config.dp(world);
}

std::vector<State> states_of(const TrainConfig& config, const config::ModelSpec& model,
                             const LocalTensors& tensors, const Stage& stage, int world) {
  const std::vector<Unit> units = units_of(model, tensors, stage);
  Accounts accounts(config, world);
  if (accounts.shares() == 1) return accounts.whole(units);
  return accounts.shared(units, stage.embedding && stage.head && model.is_tied());
}

}  // namespace lockstep::plan
