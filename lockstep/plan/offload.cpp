#include "lockstep/plan/offload.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "lockstep/config/pipeline.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/plan/state.h"

namespace lockstep::plan {
namespace {

using config::ModelSpec;
using config::TrainConfig;
using layout::OffloadUnit;
using layout::Shape;
using layout::Tier;

constexpr int64_t kLineAlignment = 64;  // parallel/shard/flat.cpp
constexpr int64_t kSmallest = 1000;     // FullyShardOptions::min_num_params
constexpr int64_t kSliceElements = int64_t{1} << 22;

class Units {
 public:
  Units(const TrainConfig& config, int world, int dp_rank)
      : element_(config.train.dtype == config::Precision::bfloat16 ? 2 : 4),
        shares_(shares_of(config, world)),
        part_(static_cast<size_t>(dp_rank % shares_)) {
    const bool adamw = config.optim.name == config::OptimizerKind::adamw;
    const double moment = adamw ? 4 : 0;
    const double other = element_ == 2 ? 2 : 0;
    on_device_ = 2 * moment + other;
    on_host_ = moment * codec::nominal_ratio(config.offload.codec.exp_avg) +
               moment * codec::nominal_ratio(config.offload.codec.exp_avg_sq) + other;
  }

  void add(std::string name, const std::vector<Shape>& shapes, bool has_state = true) {
    if (shares_ == 1) return add_whole(std::move(name), shapes, has_state);
    std::vector<Shape> large;
    for (const Shape& shape : shapes)
      (layout::numel_of(shape) >= kSmallest ? large : small_).push_back(shape);
    if (large.empty()) return;
    const auto line = layout::lay_out(large, shares_, kLineAlignment / element_);
    int64_t elements = 0;
    for (const layout::RowShard& rows : line.rows[part_]) {
      const Shape& shape = large[static_cast<size_t>(rows.tensor)];
      elements += rows.rows.size() * (layout::numel_of(shape) / shape[0]);
    }
    const int64_t share = line.blocks[part_].size() * element_;
    units_.push_back({.name = std::move(name),
                      .params = share,
                      .grads = share,
                      .line = line.size * element_,
                      .states = slices(has_state ? elements : 0)});
  }

  std::vector<OffloadUnit> all() {
    if (small_.empty()) return std::move(units_);
    add_whole("small", small_, true);
    std::rotate(units_.begin(), units_.end() - 1, units_.end());
    return std::move(units_);
  }

 private:
  void add_whole(std::string name, const std::vector<Shape>& shapes, bool has_state) {
    int64_t elements = 0;
    for (const Shape& shape : shapes) elements += layout::numel_of(shape);
    units_.push_back({.name = std::move(name),
                      .params = elements * element_,
                      .grads = elements * element_,
                      .states = slices(has_state ? elements : 0)});
  }

  std::vector<OffloadUnit::Slice> slices(int64_t elements) const {
    std::vector<OffloadUnit::Slice> slices;
    for (; elements > 0 && on_device_ > 0; elements -= kSliceElements) {
      const auto count = static_cast<double>(std::min(elements, kSliceElements));
      slices.push_back(
          {static_cast<int64_t>(count * on_device_), static_cast<int64_t>(count * on_host_)});
    }
    return slices;
  }

  int64_t element_;
  int shares_;
  size_t part_;
  double on_device_ = 0, on_host_ = 0;  // state of an element
  std::vector<OffloadUnit> units_;
  std::vector<Shape> small_;
};

// What is used and what is next.
int64_t two_largest(std::vector<int64_t> sizes) {
  std::ranges::sort(sizes, std::greater<>());
  sizes.resize(std::min<size_t>(2, sizes.size()));
  int64_t sum = 0;
  for (const int64_t size : sizes) sum += size;
  return sum;
}

KindBytes working_of(const std::vector<OffloadUnit>& units, const layout::OffloadOptions& options) {
  std::vector<int64_t> lines, grads, states;
  for (const OffloadUnit& unit : units) {
    lines.push_back(options.params ? std::max(unit.line, unit.params) : unit.line);
    grads.push_back(std::max(unit.line, unit.grads));
    for (const auto& slice : unit.states) states.push_back(slice.on_device);
  }
  return {two_largest(lines), options.grads ? two_largest(grads) : 0,
          options.optimizer ? two_largest(states) : 0};
}

}  // namespace

std::vector<OffloadUnit> offload_units(const TrainConfig& config, const ModelSpec& model, int world,
                                       int rank) {
  const auto place = layout::RankMap(config.dims(world)).coordinate_of(rank);
  const LocalTensors tensors = local_tensors(model, config.parallel.tp, place.tp);
  const std::vector<Stage> stages = stages_of(config, model);
  std::vector<Stage> mine = stages;
  if (config::is_pipelined(config.parallel)) {
    mine.clear();
    const auto schedule = schedule::generate(config::schedule_options(config, world));
    for (int chunk = 0; chunk < schedule.chunks; ++chunk)
      mine.push_back(stages[static_cast<size_t>(schedule.stage(place.pp, chunk))]);
  }
  Units units(config, world, place.dp);
  bool has_embedding = false;
  for (const Stage& stage : mine) {
    has_embedding |= stage.embedding;
    if (stage.embedding) {
      units.add("embed", tensors.embed);
      if (!tensors.positions.empty()) units.add("positions", tensors.positions);
    }
    for (int64_t i = 0; i < stage.blocks; ++i)
      units.add(format("blocks.{}", stage.first_block + i), tensors.block);
    if (!stage.head) continue;
    units.add("norm", tensors.norm);
    if (!model.is_tied()) units.add("head", tensors.head);
    // The state of a tied matrix is with the embedding.
    if (model.is_tied() && !has_embedding) units.add("head", tensors.embed, false);
  }
  return units.all();
}

OffloadPlan plan_offload(const TrainConfig& config, const ModelSpec& model, int world, int rank) {
  OffloadPlan plan{.options = layout::resolved(config.offload, 0, 0),
                   .units = offload_units(config, model, world, rank)};
  plan.working = working_of(plan.units, plan.options);
  plan.places = layout::place(plan.units, plan.working.sum(), plan.options);
  for (size_t i = 0; i < plan.units.size(); ++i) {
    const OffloadUnit& unit = plan.units[i];
    const auto& tiers = plan.places.units[i];
    (tiers.params == Tier::device ? plan.resting : plan.on_host).params += unit.params;
    (tiers.grads == Tier::device ? plan.resting : plan.on_host).grads += unit.grads;
    for (size_t k = 0; k < unit.states.size(); ++k) {
      if (tiers.states[k] == Tier::device) plan.resting.states += unit.states[k].on_device;
      if (tiers.states[k] == Tier::host) plan.on_host.states += unit.states[k].on_host;
    }
  }
  return plan;
}

std::string to_text(const OffloadPlan& plan) {
  const std::array<std::array<std::string, 5>, 4> lines{{
      {"offload", "parameters", "gradients", "optimizer", "total"},
      {"device", size_text(plan.resting.params), size_text(plan.resting.grads),
       size_text(plan.resting.states), size_text(plan.resting.sum())},
      {"host", size_text(plan.on_host.params), size_text(plan.on_host.grads),
       size_text(plan.on_host.states), size_text(plan.on_host.sum())},
      {"disk", size_text(0), size_text(0), size_text(plan.places.on_disk),
       size_text(plan.places.on_disk)},
  }};
  std::string text;
  for (const auto& line : lines) {
    text += format("{:<8}", line[0]);
    for (size_t i = 1; i < line.size(); ++i) text += format("  {:>10}", line[i]);
    text += '\n';
  }
  const layout::OffloadOptions& options = plan.options;
  text += format("{}: the device has {} with what is being used, of {}; the host budget is {}",
                 layout::name_of(options.strategy), size_text(plan.places.on_device),
                 size_text(options.device_limit), size_text(options.host_budget));
  int64_t decoded = 0, encoded = 0;
  for (const OffloadUnit& unit : plan.units) {
    for (const auto& slice : unit.states) {
      decoded += slice.on_device;
      encoded += slice.on_host;
    }
  }
  if (encoded < decoded) {
    const double ratio = static_cast<double>(encoded) / static_cast<double>(decoded);
    text += format(", which holds {} of state as {}",
                   size_text(layout::effective_budget(options.host_budget, ratio)),
                   layout::name_of(options.codec));
  }
  return text + '\n';
}

}  // namespace lockstep::plan
