// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/state_memory.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "lockstep/layout/flat_layout.h"
#include "lockstep/layout/offload_plan.h"
#include "lockstep/plan/gather_arena.h"

namespace lockstep::plan {
namespace {

using layout::Shape;
using layout::ShardingStrategy;

int64_t aligned(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Units that are alike, one behind the other.
struct UnitRun {
  std::vector<Shape> shapes = {};
  int64_t count = 1;
  bool is_tied_copy = false;  // the optimizer has it elsewhere
  bool used_in_backward = true;
  int64_t element = 0;  // as of Unit
  bool trained = true, sparse = false;
  std::vector<int> owners = {};  // of the shapes, where ranks share whole tensors

  bool has_dense_gradient() const { return trained && !sparse; }
  bool is_laid_out_as(const UnitRun& other) const {
    return element == other.element && trained == other.trained;
  }
};

std::vector<UnitRun> units_of(const Run& run, const Stage& stage, int tp) {
  const Model& model = run.model;
  const std::vector<std::vector<int>> owners = tensor_owners(run, stage, tp);
  size_t unit_index = 0;
  const auto next_owners = [&] {
    return owners.empty() ? std::vector<int>() : owners[unit_index++];
  };
  const auto units_of_kind = [&](size_t kind) -> const std::vector<Unit>& {
    return model.kinds[kind].units[static_cast<size_t>(tp)];
  };
  std::vector<UnitRun> runs;
  std::optional<size_t> last;  // kind
  for (size_t i = stage.first; i < stage.end(); ++i) {
    const size_t kind = model.layers[i].kind;
    const std::vector<Unit>& units = units_of_kind(kind);
    // Owners of whole tensors differ from unit to unit.
    if (kind == last && units.size() == 1 && owners.empty()) {
      ++runs.back().count;
      continue;
    }
    last = kind;
    for (const Unit& unit : units)
      runs.push_back({.shapes = unit.shapes,
                      .is_tied_copy = unit.copy,
                      .used_in_backward = !unit.embedding,
                      .element = unit.element,
                      .trained = unit.trained,
                      .sparse = unit.sparse,
                      .owners = next_owners()});
  }
  if (has_tied_copy(model, stage)) {
    const size_t first = model.layers.front().kind;
    const Unit& table = units_of_kind(first).front();
    runs.push_back({.shapes = table.shapes,
                    .is_tied_copy = true,
                    .trained = table.trained,
                    .owners = next_owners()});
  }
  return runs;
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
  explicit Accounts(const Run& run)
      : run_(run),
        element_(static_cast<int64_t>(size_of(run.dtype))),
        states_(static_cast<size_t>(run.dims.dp)) {
    // Without a pipeline the last micro-batch joins the sum where it is.
    if (run.reproducible)
      leaf_copies_ = tree_buffers(run.pipeline ? run.micro_batches : run.micro_batches - 1);
  }

  std::vector<State> whole(const std::vector<UnitRun>& units) {
    // What is offloaded has lines of its own (offload_of_shards).
    const bool offloaded = run_.offload.any();
    const bool buckets = offloaded || run_.dims.dp > 1 || run_.reproducible;
    // Micro-batches before the last are summed where autograd makes them.
    const bool waits = buckets && !offloaded && run_.micro_batches > 1 && !run_.reproducible;
    State state;
    for (const UnitRun& unit : units) {
      for (const Shape& shape : unit.shapes) {
        const int64_t elements = unit.count * layout::numel_of(shape);
        const int64_t bytes = elements * element_of(unit);
        const int64_t gradient =
            buckets ? unit.count * aligned(bytes / unit.count, layout::kBucketAlignment) : bytes;
        state.parameters += bytes;
        if (unit.trained && !unit.is_tied_copy) state.optimizer += elements * state_bytes_of(unit);
        if (!unit.has_dense_gradient()) continue;
        state.gradients += gradient;
        state.buffers += leaf_copies_ * gradient + (waits ? bytes : 0);
        if (waits || !buckets) state.made_in_backward += bytes;
      }
    }
    states_.assign(states_.size(), state);
    return std::move(states_);
  }

  // `ends_as_it_begins`: the first unit is the last, too.
  std::vector<State> shared(const std::vector<UnitRun>& units, bool ends_as_it_begins) {
    std::vector<UnitRun> small;  // of all units, whole on every rank
    std::vector<Line> lines;
    for (const UnitRun& unit : units) {
      UnitRun large = unit;
      large.shapes.clear();
      large.owners.clear();
      for (const size_t i : layout::order_of_tensors(unit.shapes.size(), unit.owners)) {
        const Shape& shape = unit.shapes[i];
        if (layout::numel_of(shape) >= run_.min_sharded) {
          large.shapes.push_back(shape);
          if (!unit.owners.empty()) large.owners.push_back(unit.owners[i]);
        } else {
          auto& shapes = like(unit, small).shapes;
          shapes.insert(shapes.end(), static_cast<size_t>(unit.count), shape);
        }
      }
      if (!large.shapes.empty()) lines.push_back(add_shards(large));
    }
    for (const UnitRun& unit : small) add_whole(unit);
    if (run_.sharding != ShardingStrategy::optimizer && !run_.offload.any())
      add_buffers(lines, ends_as_it_begins);
    return std::move(states_);
  }

 private:
  struct Line {
    int64_t bytes, count;
    bool used_in_backward, trained;
  };

  int64_t element_of(const UnitRun& unit) const {
    return unit.element > 0 ? unit.element : element_;
  }
  // Moments of float64 parameters are float64 too.
  int64_t state_bytes_of(const UnitRun& unit) const {
    return (unit.element == 8 ? 2 : 1) * run_.state_bytes;
  }

  // The one of these that is laid out as `unit` is; made where there is none.
  static UnitRun& like(const UnitRun& unit, std::vector<UnitRun>& all) {
    for (UnitRun& each : all) {
      if (each.is_laid_out_as(unit)) return each;
    }
    return all.emplace_back(UnitRun{.element = unit.element, .trained = unit.trained});
  }

  layout::FlatLayout lay_out(const UnitRun& unit, int parts) const {
    return layout::lay_out(unit.shapes, unit.owners, parts,
                           layout::kFlatAlignment / element_of(unit));
  }

  Line add_shards(const UnitRun& unit) {
    const layout::FlatLayout line = lay_out(unit, run_.shards);
    const int64_t element = element_of(unit);
    const Line bytes{line.size * element, unit.count, unit.used_in_backward, unit.trained};
    const bool resident = run_.sharding == ShardingStrategy::optimizer;
    for (int rank = 0; rank < run_.dims.dp; ++rank) {
      State& state = states_[static_cast<size_t>(rank)];
      const auto part = static_cast<size_t>(rank % run_.shards);
      const int64_t share = line.blocks[part].size() * element;
      int64_t elements = 0;
      for (const layout::RowShard& rows : line.rows[part]) {
        const Shape& shape = unit.shapes[static_cast<size_t>(rows.tensor)];
        elements += rows.rows.size() * layout::numel_of(shape) / (shape.empty() ? 1 : shape[0]);
      }
      state.parameters += unit.count * (resident ? bytes.bytes : share);
      if (!unit.trained) continue;
      state.gradients += unit.count * (share + (resident ? bytes.bytes : 0));
      if (!unit.is_tied_copy) state.optimizer += unit.count * elements * state_bytes_of(unit);
      state.buffers += unit.count * leaf_copies_ * bytes.bytes;
    }
    return bytes;
  }

  void add_whole(const UnitRun& unit) {
    int64_t elements = 0;
    for (const Shape& shape : unit.shapes) elements += layout::numel_of(shape);
    const int64_t line = lay_out(unit, 1).size * element_of(unit);
    for (State& state : states_) {
      state.parameters += elements * element_of(unit);
      if (!unit.trained) continue;
      state.gradients += line;
      state.optimizer += elements * state_bytes_of(unit);
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
    int64_t all = 0, trained = 0, largest = 0;
    for (const Line& line : lines) {
      all += line.count * line.bytes;
      if (!line.trained) continue;
      trained += line.count * line.bytes;
      largest = std::max(largest, line.bytes);
    }
    // A pipeline gathers a stage at a time; else the one that is used and the next.
    const bool gathers_all = run_.pipeline || run_.sharding == ShardingStrategy::shard_grad_op;
    const int64_t gathered = gathers_all ? all : gathered_bytes(uses_of(lines, ends_as_it_begins));
    // Unreduced gradients of micro-batches wait for the last one.
    const bool waits = run_.micro_batches > 1 && !run_.reproducible;
    const int64_t reduced =
        waits ? trained : std::min(trained, layout::num_gradient_blocks(false, false) * largest);
    for (State& state : states_) state.buffers += gathered + reduced;
  }

  const Run& run_;
  int64_t element_;
  int64_t leaf_copies_ = 0;
  std::vector<State> states_;
};

}  // namespace

std::vector<State> states_of(const Run& run, const Stage& stage, int tp) {
  const std::vector<UnitRun> units = units_of(run, stage, tp);
  Accounts accounts(run);
  const bool whole = stage.first == 0 && stage.end() == run.model.layers.size();
  std::vector<State> states = run.shards == 1
                                  ? accounts.whole(units)
                                  : accounts.shared(units, whole && !run.model.tied.empty());
  int64_t buffers = 0;
  for (size_t i = stage.first; i < stage.end(); ++i)
    buffers += run.model.kinds[run.model.layers[i].kind].buffers;
  for (State& state : states) state.parameters += buffers;
  return states;
}

}  // namespace lockstep::plan
