// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/step_time.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "lockstep/core/error.h"

namespace lockstep::plan {
namespace {

using layout::Axis;
using layout::PipelineSchedule;
using layout::ShardingStrategy;
using schedule::Action;
using schedule::Op;

// Layers of one stage.
struct StageTime {
  PassTime forward = {}, input = {}, weight = {};
  double parameters = 0;

  PassTime backward() const {
    PassTime sum = input;
    sum += weight;
    return sum;
  }
  StageTime& operator+=(const StageTime& other) {
    forward += other.forward;
    input += other.input;
    weight += other.weight;
    parameters += other.parameters;
    return *this;
  }
};

// Consecutive layers of a model.
struct LayerRange {
  int begin = 0, count = 0;
};
// `of_head` multiplies the time of the last layer of the model.
StageTime stage_of(const LayerTimes& layers, LayerRange range, int of_model, double of_head) {
  StageTime stage;
  const auto add = [&](const LayerTime& layer, double count, double time = 1) {
    stage.forward += layer.forward * (count * time);
    stage.input += layer.input * (count * time);
    stage.weight += layer.weight * (count * time);
    stage.parameters += layer.parameters * count;
  };
  const int end = range.begin + range.count;
  if (!layers.each.empty()) {
    for (int i = range.begin; i < end; ++i)
      add(layers.each[static_cast<size_t>(i)], 1, i + 1 == of_model ? of_head : 1);
    return stage;
  }
  const bool first = range.begin == 0, last = end == of_model;
  if (first) add(layers.embedding, 1);
  if (last) add(layers.head, 1, of_head);
  add(layers.block, range.count - (first ? 1 : 0) - (last ? 1 : 0));
  return stage;
}

// How the stages of a pipeline lie on its ranks, without the order of their actions.
schedule::Pipeline placement_of(const Layout& layout) {
  const bool v =
      layout.schedule == PipelineSchedule::zb_v || layout.schedule == PipelineSchedule::dualpipe_v;
  return {layout.schedule, layout.dims.pp, static_cast<int>(layout.micro_batches), layout.chunks,
          v ? schedule::StageOrder::v : schedule::StageOrder::loop};
}

class StepClock {
 public:
  StepClock(const ModelShape& model, const Layout& layout, const Cluster& cluster,
            const LayerTimes& layers)
      : model_(model),
        layout_(layout),
        cluster_(cluster),
        layers_(layers),
        pipeline_(placement_of(layout)) {
    // Ranks with as many layers and the same ends are alike.
    const int stages = layout.dims.pp * layout.chunks;
    for (int stage = 0; stage < stages; ++stage) {
      ranges_.push_back({of_model_, layers_of(stage)});
      of_model_ += ranges_.back().count;
    }
    for (int rank = 0; rank < layout.dims.pp; ++rank) {
      RankLayers mine{.rank = layers.each.empty() ? -1 : rank};
      for (int chunk = 0; chunk < layout.chunks; ++chunk) {
        const int stage = pipeline_.stage(rank, chunk);
        mine.count += layers_of(stage);
        mine.first |= stage == 0;
        mine.last |= stage + 1 == stages;
      }
      const auto alike = std::ranges::find(kinds_, mine, &RankKind::layers);
      if (alike != kinds_.end()) {
        ++alike->ranks;
        continue;
      }
      RankKind kind{mine, 1};
      for (int chunk = 0; chunk < layout.chunks; ++chunk)
        kind.time += stage_time(pipeline_.stage(rank, chunk));
      kinds_.push_back(kind);
    }
  }

  StepTime time(Pipelined how) const {
    StepTime step;
    const StageTime& most = std::ranges::max_element(kinds_, {}, &RankKind::busy)->time;
    const auto times = static_cast<double>(layout_.micro_batches);
    PassTime passes = most.forward;
    passes += most.backward();
    double whole = how == Pipelined::simulated ? simulated() : estimated();
    const double crowded = less_crowded(whole);
    passes = passes * (times * crowded);
    whole *= crowded;
    step.compute = passes.compute;
    step.tensor = passes.tensor;
    step.context = passes.context;
    step.gather = passes.gather;
    step.host = passes.host;
    // Ranks wait for messages and for each other; the first is at most the hops that follow each
    // other in every micro-batch.
    const double waits = std::max(0.0, whole - passes.total());
    step.pipeline = layout_.dims.pp > 1 ? std::min(waits, hops_in_a_row() * hop()) : 0;
    step.bubble = waits - step.pipeline;
    for (const RankKind& rank : kinds_) {
      step.data = std::max(step.data, exposed_reduction(rank.time));
      step.optimizer = std::max(step.optimizer, update(rank));
    }
    step.fixed = cluster_.efficiency.step;
    return step;
  }

  Timeline timeline() const {
    const schedule::Schedule schedule = generated();
    return {schedule, schedule::simulate(schedule, cost(less_crowded(simulated())), hops())};
  }

 private:
  struct RankLayers {
    int rank = -1;  // where layers differ, so that no rank is like another
    int count = 0;
    bool first = false, last = false;

    bool operator==(const RankLayers&) const = default;
  };
  struct RankKind {
    RankLayers layers = {};
    int ranks = 0;
    StageTime time = {};

    double busy() const { return time.forward.total() + time.backward().total(); }
  };

  StageTime stage_time(int stage) const {
    return stage_of(layers_, ranges_[static_cast<size_t>(stage)], of_model_, of_head());
  }

  // Ranks of a pipeline wait in its bubbles, and one of them has the head: those that compute then
  // have more of their host, if it has all stages.
  bool has_bubbles() const {
    const Efficiency& efficiency = cluster_.efficiency;
    if (efficiency.alone == 1 && efficiency.alone_head == 1) return false;  // nothing would change
    int stage = 0;
    while (stage < layout_.dims.pp && same_host(0, stage)) ++stage;
    return layout_.dims.pp > 1 && stage == layout_.dims.pp && cluster_.devices_per_node > 1;
  }
  double less_crowded(double whole) const {
    if (!has_bubbles()) return 1;
    double busy = 0;
    for (const RankKind& rank : kinds_) busy += rank.ranks * rank.busy();
    busy *= static_cast<double>(layout_.micro_batches) / layout_.dims.pp / whole;
    return std::lerp(cluster_.efficiency.alone, 1.0, std::min(1.0, busy));
  }
  double of_head() const {
    if (!has_bubbles()) return 1;
    const double heads = static_cast<double>(cluster_.devices_per_node) / layout_.dims.pp;
    const double crowd = std::clamp((heads - 1) / (cluster_.devices_per_node - 1), 0.0, 1.0);
    const Efficiency& efficiency = cluster_.efficiency;
    return std::lerp(std::min(1.0, efficiency.alone_head / efficiency.alone), 1.0, crowd);
  }

  int layers_of(int stage) const {
    return layout_.dims.pp == 1 ? static_cast<int>(model_.layers) + 2
                                : layout_.layers_per_stage[static_cast<size_t>(stage)];
  }

  schedule::Schedule generated() const {
    return schedule::generate({.kind = layout_.schedule,
                               .ranks = layout_.dims.pp,
                               .microbatches = static_cast<int>(layout_.micro_batches),
                               .chunks = layout_.chunks,
                               .group = layout_.group,
                               .file = layout_.schedule_file});
  }

  schedule::Cost cost(double times = 1) const {
    std::vector<std::array<double, 3>> seconds;  // of each stage
    const int stages = pipeline_.stages();
    for (int i = 0; i < stages; ++i) {
      const StageTime stage = stage_time(i);
      seconds.push_back({times * stage.forward.total(), times * stage.input.total(),
                         times * stage.weight.total()});
    }
    return [seconds, pipeline = pipeline_](int rank, const Action& action) {
      const auto& [forward, input, weight] =
          seconds[static_cast<size_t>(pipeline.stage(rank, action.chunk))];
      switch (action.op) {
        case Op::forward:
          return forward;
        case Op::backward:
          return input + weight;
        case Op::backward_input:
          return input;
        case Op::backward_weight:
          return weight;
        default:
          return 0.0;
      }
    };
  }

  double message_bytes() const {
    const bool parts = layout_.sequence_parallel || cluster_.software.scatter_messages;
    return static_cast<double>(layout_.local_tokens() * model_.hidden) * layout_.element /
           (parts ? layout_.dims.tp : 1);
  }
  bool same_host(int from, int to) const {
    const layout::RankMap map(layout_.dims, layout_.order);
    return map.rank_at({.pp = from}) / cluster_.devices_per_node ==
           map.rank_at({.pp = to}) / cluster_.devices_per_node;
  }
  // The longest of the pipeline.
  double hop() const { return message_time(cluster_, same_host(0, 1), message_bytes()); }
  // Of 1F1B: a micro-batch waits for two of its hops once in every round of the ranks. Filling and
  // draining the pipeline takes the others, and all of a schedule that hides them.
  double hops_in_a_row() const {
    const double ranks = layout_.dims.pp;
    const bool waits = layout_.schedule == PipelineSchedule::one_f_one_b;
    const double rounds = static_cast<double>(layout_.micro_batches) / ranks;
    return (waits ? 2 * (ranks - 1) * rounds : 0) + 2 * (ranks * layout_.chunks - 1);
  }
  schedule::Hop hops() const {
    const double near = message_time(cluster_, true, message_bytes());
    const double far = message_time(cluster_, false, message_bytes());
    const auto ranks = static_cast<size_t>(layout_.dims.pp);
    std::vector<bool> same(ranks * ranks);
    for (int from = 0; from < layout_.dims.pp; ++from) {
      for (int to = 0; to < layout_.dims.pp; ++to)
        same[static_cast<size_t>(from) * ranks + static_cast<size_t>(to)] = same_host(from, to);
    }
    return [near, far, same, ranks](int from, int to) {
      return same[static_cast<size_t>(from) * ranks + static_cast<size_t>(to)] ? near : far;
    };
  }

  double simulated() const {
    if (layout_.dims.pp == 1) return one_rank();
    return schedule::simulate(generated(), cost(), hops()).makespan;
  }
  double one_rank() const { return static_cast<double>(layout_.micro_batches) * kinds_[0].busy(); }

  // The slowest rank works all the time but for filling and draining, which later schedules make
  // shorter.
  double estimated() const {
    if (layout_.dims.pp == 1) return one_rank();
    double slowest = 0, forward = 0, input = 0, weight = 0;
    for (const RankKind& rank : kinds_) {
      slowest = std::max(slowest, rank.busy());
      forward += rank.ranks * rank.time.forward.total();
      input += rank.ranks * rank.time.input.total();
      weight += rank.ranks * rank.time.weight.total();
    }
    const double others = static_cast<double>(layout_.dims.pp - 1) / layout_.dims.pp;
    const auto batches = static_cast<double>(layout_.micro_batches);
    double bubble = 0;
    switch (layout_.schedule) {
      case PipelineSchedule::zb_h1:
      case PipelineSchedule::zb_h2:
        bubble = others * std::max(0.0, forward + input - weight);
        break;
      case PipelineSchedule::zb_v:
      case PipelineSchedule::dualpipe_v:
        bubble = others * std::max(0.0, (forward + input - weight) / 2);
        break;
      case PipelineSchedule::zb_1p:
        bubble = others * std::max(0.0, forward + input - weight) / layout_.chunks;
        break;
      case PipelineSchedule::sequential:
      case PipelineSchedule::round_robin:
        return batches * (forward + input + weight);
      case PipelineSchedule::interleaved:
      case PipelineSchedule::looped_bfs:
        bubble = others * (forward + input + weight) / layout_.chunks;
        break;
      default:
        bubble = forward + input + weight - slowest;
    }
    return batches * slowest + bubble + hops_in_a_row() * hop();
  }

  // Whole gradients are summed, or brought to the ranks that update them, while the last backward
  // runs, which slows down by a part of what it hides. Parameters come back after an update of
  // shards.
  double exposed_reduction(const StageTime& rank) const {
    const Software& software = cluster_.software;
    const GroupShape all = shape_of(layout_, Axis::dp, cluster_.devices_per_node);
    if (all.ranks == 1) return 0;
    const double bytes =
        rank.parameters * (software.gradient_bytes > 0 ? software.gradient_bytes : layout_.element);
    const double window = software.overlap * rank.backward().total();
    const auto hidden_under = [&](double room, double seconds) {
      return std::max(0.0, seconds - room) + software.slowdown * std::min(seconds, room);
    };
    switch (layout_.shard) {
      case ShardingStrategy::no_shard:
        return hidden_under(window, collective_time(cluster_, Collective::all_reduce, all, bytes));
      case ShardingStrategy::optimizer:
        return hidden_under(software.overlap_scatter ? window : 0,
                            collective_time(cluster_, Collective::reduce_scatter, all, bytes)) +
               collective_time(cluster_, Collective::all_gather, all,
                               rank.parameters * layout_.element);
      case ShardingStrategy::hybrid_shard: {
        const int copies = std::max(1, all.ranks / layout_.shards);
        const GroupShape across{copies, std::min(copies, all.hosts)};
        return hidden_under(window, collective_time(cluster_, Collective::all_reduce, across,
                                                    bytes / layout_.shards));
      }
      default:
        return 0;
    }
  }

  // Offloaded state streams through the device while it computes: what takes longer is exposed.
  double update(const RankKind& rank) const {
    const double own =
        rank.time.parameters / (layout_.shard == ShardingStrategy::no_shard ? 1 : layout_.shards);
    // The constant is for two moments in float32, each read and written.
    const double bytes =
        std::max(0.0, cluster_.software.optimizer_bytes - 4 * (4 - layout_.moment));
    const double computed = bytes * own / (cluster_.device.bandwidth * cluster_.efficiency.memory);
    if (!layout_.offload_optimizer) return computed;
    // Two moments in float32, and what bfloat16 lacks of the master weight.
    const double moved = own * (layout_.element < 4 ? 10 : 8) / cluster_.links.device_link;
    const double passes = static_cast<double>(layout_.micro_batches) * rank.busy();
    return computed + std::max(0.0, moved - passes);
  }

  const ModelShape& model_;
  const Layout& layout_;
  const Cluster& cluster_;
  const LayerTimes& layers_;
  schedule::Pipeline pipeline_;
  std::vector<LayerRange> ranges_;  // of each stage
  int of_model_ = 0;                // layers
  std::vector<RankKind> kinds_;
};

}  // namespace

StepTime step_time(const ModelShape& model, const Layout& layout, const Cluster& cluster,
                   Pipelined how) {
  return step_time(model, layout, cluster, layer_times(model, layout, cluster), how);
}

StepTime step_time(const ModelShape& model, const Layout& layout, const Cluster& cluster,
                   const LayerTimes& layers, Pipelined how) {
  return StepClock(model, layout, cluster, layers).time(how);
}

Timeline timeline_of(const ModelShape& model, const Layout& layout, const Cluster& cluster) {
  check(layout.dims.pp > 1, "only a pipeline has a timeline");
  const LayerTimes layers = layer_times(model, layout, cluster);
  return StepClock(model, layout, cluster, layers).timeline();
}

GroupShape shape_of(const Layout& layout, layout::Axis axis, int devices_per_node) {
  int stride = 1, size = 1;
  // Slowest first: what stands behind the axis is between two of its neighbours.
  bool behind = false;
  for (const layout::Axis each : layout::axes_of(layout.order)) {
    const int length = each == Axis::dp   ? layout.dims.dp
                       : each == Axis::tp ? layout.dims.tp
                                          : layout.dims.pp;
    if (behind) stride *= length;
    if (each == axis) behind = true, size = length;
  }
  const int per_host = std::clamp(devices_per_node / stride, 1, size);
  return {size, (size + per_host - 1) / per_host};
}

double mfu(const ModelShape& model, const Layout& layout, const Cluster& cluster, double seconds) {
  const double flop = model.flops_per_token(layout.sequence) * static_cast<double>(layout.tokens());
  return flop / seconds / (cluster.device.flops * static_cast<double>(layout.dims.world_size()));
}

double hfu(const ModelShape& model, const Layout& layout, const Cluster& cluster, double seconds) {
  const auto width = static_cast<double>(model.layers * model.heads * model.head_size);
  const double attention = 4 * width * static_cast<double>(layout.sequence);
  const double block = 2 * model.block_parameters();
  const auto layers = static_cast<double>(model.layers);
  std::vector<layout::Recompute> blocks = layout.recompute_of_blocks;
  if (blocks.empty()) blocks.assign(static_cast<size_t>(model.layers), layout.recompute);
  double again = 0;
  for (const layout::Recompute recompute : blocks) {
    if (recompute == layout::Recompute::full) {
      again += attention / layers + block;
    } else if (layout.tiles) {
      again += 2 * static_cast<double>(model.hidden * model.ffn) * (model.gated ? 3 : 2);
    }
  }
  if (layout.tiles) again += 2 * static_cast<double>(model.hidden * model.vocab);
  return mfu(model, layout, cluster, seconds) *
         (1 + again / model.flops_per_token(layout.sequence));
}

}  // namespace lockstep::plan
