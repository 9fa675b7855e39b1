// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/search.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/plan/quick_memory.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::config {
namespace {

using layout::Order;
using layout::PipelineSchedule;
using layout::Recompute;
using layout::ShardingStrategy;

constexpr size_t kExact = 160;     // candidates that are planned exactly
constexpr double kSlack = 1.1;     // of the estimate of memory
constexpr double kRisk = 1.1;      // of layouts that fill the memory
constexpr double kSafePart = 0.9;  // of the memory

// One layout, as small as it can be: there are 10^5 of them.
struct TriedLayout {
  int world = 1, tp = 1, pp = 1, chunks = 1, shard_size = 0;
  Order order = Order::pp_fastest;
  int64_t micro_batch = 1;
  ShardingStrategy shard = ShardingStrategy::no_shard;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  Recompute recompute = Recompute::none;
  bool sequence_parallel = false, offload = false, balanced = false;
  double seconds = 0, bytes = 0;
};

struct PipelineChoice {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int chunks = 1;
};

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> found;
  for (int64_t i = 1; i * i <= number; ++i) {
    if (number % i != 0) continue;
    found.push_back(i);
    if (i * i != number) found.push_back(number / i);
  }
  std::ranges::sort(found);
  return found;
}

template <class Function>
bool allowed(const Function& rule) {
  try {
    rule();
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

class Search {
 public:
  Search(const TrainConfig& config, const ModelSpec& model, const Origins& origins,
         const plan::Cluster& cluster)
      : base_(config),
        model_(model),
        origins_(origins),
        cluster_(cluster),
        shape_(shape_of(model)),
        limit_(memory_limit(config, cluster)) {}

  SearchResult run(const std::vector<int>& worlds) {
    largest_ = *std::ranges::max_element(worlds);
    for (const int world : worlds) enumerate(world, false);
    // Offload is slow: only where nothing else fits, or where it was asked for. Moments in bfloat16
    // cannot be offloaded.
    if (fitting_.empty() && !is_fixed("offload.optimizer") &&
        base_.optim.moments == Precision::float32) {
      for (const int world : worlds) enumerate(world, true);
    }
    plan_exactly();
    return std::move(result_);
  }

 private:
  bool is_fixed(const std::string& key) const {
    const auto found = origins_.find(key);
    return found != origins_.end() && found->second != Origin::by_default;
  }
  template <class T>
  std::vector<T> axis(const std::string& key, const T& given, std::vector<T> all) const {
    return is_fixed(key) ? std::vector<T>{given} : std::move(all);
  }

  // Options that are an error without a pipeline.
  bool asks_for_stages() const {
    return (is_fixed("parallel.schedule") && base_.parallel.schedule) ||
           (is_fixed("parallel.chunks") && base_.parallel.chunks > 1) ||
           (is_fixed("parallel.split") && !base_.parallel.split.empty());
  }

  TrainConfig config_of(const TriedLayout& candidate) const {
    TrainConfig config = base_;
    LayoutConfig& parallel = config.parallel;
    parallel.dp = candidate.world / candidate.tp / candidate.pp / parallel.cp;
    parallel.tp = candidate.tp;
    parallel.pp = candidate.pp;
    parallel.order = candidate.order;
    parallel.shard = candidate.shard;
    parallel.shard_size = candidate.shard_size;
    parallel.sequence_parallel = candidate.sequence_parallel;
    if (candidate.pp > 1) {
      parallel.schedule = candidate.schedule;
      parallel.chunks = candidate.chunks;
      if (candidate.balanced) {
        const auto& split = balanced_.at({candidate.tp, candidate.pp, candidate.chunks,
                                          candidate.micro_batch, candidate.recompute});
        parallel.split.assign(split.begin(), split.end());
      }
    } else {
      parallel.schedule.reset();
      parallel.chunks = 1;
      parallel.split.clear();
    }
    config.train.global_batch = batch();
    config.train.micro_batch = candidate.micro_batch;
    config.train.recompute = candidate.recompute;
    if (candidate.offload) config.offload.optimizer = true;
    return config;
  }
  // All numbers of ranks are compared with the same batch.
  int64_t batch() const {
    return base_.train.global_batch > 0 ? base_.train.global_batch
                                        : base_.train.micro_batch * largest_ / base_.parallel.cp;
  }

  void enumerate(int world, bool offload) {
    const LayoutConfig& given = base_.parallel;
    for (const int64_t tp : axis<int64_t>("parallel.tp", given.tp, divisors(world))) {
      if (world % tp != 0) continue;
      for (const int64_t pp : axis<int64_t>("parallel.pp", given.pp, divisors(world / tp))) {
        if (world / tp % pp != 0 || pp > model_.layers + 2) continue;
        if (pp == 1 && asks_for_stages()) continue;
        if (world / tp / pp % given.cp != 0) continue;
        const int64_t dp = world / tp / pp / given.cp;
        if (given.dp > 0 && is_fixed("parallel.dp") && dp != given.dp) continue;
        if (batch() % dp != 0) continue;
        TriedLayout candidate{.world = world,
                              .tp = static_cast<int>(tp),
                              .pp = static_cast<int>(pp),
                              .offload = offload};
        enumerate_batches(candidate, batch() / dp);
      }
    }
  }

  void enumerate_batches(TriedLayout candidate, int64_t rows) {
    for (const bool sequence :
         axis<bool>("parallel.sequence_parallel", base_.parallel.sequence_parallel,
                    candidate.tp > 1 ? std::vector<bool>{false, true} : std::vector<bool>{false})) {
      candidate.sequence_parallel = sequence;
      TrainConfig tensor = base_;
      tensor.parallel.tp = candidate.tp;
      tensor.parallel.sequence_parallel = sequence;
      if (!allowed([&] { validate_tensor(tensor, model_); })) continue;
      for (const int64_t micro :
           axis<int64_t>("train.micro_batch", base_.train.micro_batch, divisors(rows))) {
        if (rows % micro != 0) continue;
        candidate.micro_batch = micro;
        for (const Recompute recompute : axis<Recompute>(
                 is_fixed("memory.strategy") ? "memory.strategy" : "train.recompute",
                 base_.recompute(), {Recompute::none, Recompute::selective, Recompute::full})) {
          candidate.recompute = recompute;
          enumerate_orders(candidate, rows / micro);
        }
      }
    }
  }

  void enumerate_orders(TriedLayout candidate, int64_t micro_batches) {
    // One host has one kind of link, and one axis one order.
    const int axes = (candidate.tp > 1) + (candidate.pp > 1) +
                     (candidate.world / candidate.tp / candidate.pp > 1);
    const bool matters = candidate.world > cluster_.devices_per_node && axes > 1;
    for (const Order order :
         axis<Order>("parallel.order", base_.parallel.order,
                     matters ? std::vector<Order>{Order::pp_fastest, Order::tp_fastest,
                                                  Order::dp_pp_tp, Order::pp_tp_dp}
                             : std::vector<Order>{Order::pp_fastest})) {
      candidate.order = order;
      plan::Layout layout = start_layout(candidate, micro_batches);
      for (const auto& [shard, size] : shardings(candidate)) {
        candidate.shard = layout.shard = shard;
        candidate.shard_size = size;
        const int dp = layout.dims.dp;
        layout.shards = shard == ShardingStrategy::no_shard ? 1 : size > 0 ? size : dp;
        const plan::LayerTimes layers = plan::layer_times(shape_, layout, cluster_);
        if (candidate.pp == 1) {
          layout.layers_per_stage.clear();
          weigh(candidate, layout, layers);
          continue;
        }
        for (const PipelineChoice& pipeline : pipelines(candidate, micro_batches)) {
          candidate.schedule = layout.schedule = pipeline.schedule;
          candidate.chunks = layout.chunks = pipeline.chunks;
          for (const bool balanced : {false, true}) {
            candidate.balanced = balanced;
            if (!cut(candidate, layers, layout.layers_per_stage)) continue;
            weigh(candidate, layout, layers);
          }
        }
      }
    }
  }

  plan::Layout start_layout(const TriedLayout& candidate, int64_t micro_batches) const {
    return {.dims = {candidate.world / candidate.tp / candidate.pp, candidate.tp, candidate.pp},
            .order = candidate.order,
            .group = base_.parallel.group,
            .sequence = base_.train.seq_len,
            .micro_batch = candidate.micro_batch,
            .micro_batches = micro_batches,
            .rows = batch(),
            .recompute = candidate.recompute,
            .sequence_parallel = candidate.sequence_parallel,
            .tiles = computes_in_tiles(base_, candidate.sequence_parallel ? candidate.tp : 1),
            .cp = base_.parallel.cp,
            .ring = base_.parallel.cp > 1 && base_.attends_in_ring(),
            .offload_params = base_.offload.params,
            .offload_grads = base_.offload.grads,
            .offload_optimizer = base_.offload.optimizer || candidate.offload,
            .element = static_cast<double>(element_bytes_of(base_)),
            .moment = static_cast<double>(moment_bytes_of(base_)),
            .fp8_min = fp8_min_of(base_)};
  }

  std::vector<std::pair<ShardingStrategy, int>> shardings(const TriedLayout& candidate) const {
    const int dp = candidate.world / candidate.tp / candidate.pp;
    const int given = base_.parallel.shard_size;
    if (is_fixed("parallel.shard")) return {{base_.parallel.shard, given}};
    if (is_fixed("parallel.shard_size") && given > 0) {
      if (dp % given != 0) return {};
      return {{ShardingStrategy::hybrid_shard, given}};
    }
    std::vector<std::pair<ShardingStrategy, int>> list{{ShardingStrategy::no_shard, 0}};
    if (dp == 1) return list;
    list.insert(list.end(), {{ShardingStrategy::optimizer, 0},
                             {ShardingStrategy::shard_grad_op, 0},
                             {ShardingStrategy::full_shard, 0}});
    const int inside = std::max(1, cluster_.devices_per_node / candidate.tp);
    if (inside > 1 && inside < dp && dp % inside == 0)
      list.push_back({ShardingStrategy::hybrid_shard, inside});
    return list;
  }

  // Those that the schedule's own rules allow.
  const std::vector<PipelineChoice>& pipelines(const TriedLayout& candidate,
                                               int64_t micro_batches) {
    auto& list = pipelines_[{candidate.pp, micro_batches}];
    if (!list.empty()) return list;
    std::vector<PipelineChoice> all;
    if (is_fixed("parallel.schedule") || is_fixed("parallel.chunks")) {
      TrainConfig config = base_;
      config.parallel.pp = candidate.pp;
      const auto options = schedule_options(config, candidate.world);
      all = {{options.kind, options.chunks}};
    } else {
      all = {{PipelineSchedule::one_f_one_b, 1},
             {PipelineSchedule::zb_h1, 1},
             {PipelineSchedule::zb_v, 2}};
      for (const int chunks : {2, 3, 4, 5, 8})
        all.push_back({PipelineSchedule::interleaved, chunks});
    }
    for (const PipelineChoice& each : all) {
      const schedule::ScheduleOptions options{.kind = each.schedule,
                                              .ranks = candidate.pp,
                                              .microbatches = static_cast<int>(micro_batches),
                                              .chunks = each.chunks,
                                              .group = base_.parallel.group,
                                              .file = base_.parallel.schedule_file};
      if (allowed([&] { schedule::require_valid(options); })) list.push_back(each);
    }
    return list;
  }

  // Layers of each stage: as given, equal, or so that the slowest stage is as fast as it can be.
  bool cut(const TriedLayout& candidate, const plan::LayerTimes& layers, std::vector<int>& counts) {
    const int stages = candidate.pp * candidate.chunks;
    if (!candidate.balanced) {
      auto& found = equal_[stages];
      if (!found.first) {
        LayoutConfig parallel = base_.parallel;
        parallel.pp = candidate.pp;
        parallel.chunks = candidate.chunks;
        found = {true, {}};
        allowed([&] { found.second = layers_per_stage(parallel, model_.layers); });
      }
      counts = found.second;
      return !counts.empty();
    }
    if (is_fixed("parallel.split") || stages > model_.layers) return false;
    auto& found = balanced_[{candidate.tp, candidate.pp, candidate.chunks, candidate.micro_batch,
                             candidate.recompute}];
    if (found.empty()) found = balance(layers, stages);
    counts = found;
    return counts != equal_[stages].second;
  }

  // The blocks that the head and the embedding weigh are missing in their stages.
  std::vector<int> balance(const plan::LayerTimes& layers, int stages) const {
    const auto of = [](const plan::LayerTime& layer) {
      return layer.forward.total() + layer.backward().total();
    };
    const double block = of(layers.block), head = of(layers.head) / block,
                 embedding = of(layers.embedding) / block;
    std::vector<int> counts(static_cast<size_t>(stages), 0);
    std::vector<double> load(counts.size(), 0);
    load.front() += embedding;
    load.back() += head;
    counts.front() += 1;
    counts.back() += 1;
    // Stages between the ends have at least one.
    int64_t left = model_.layers;
    for (size_t i = 1; i + 1 < counts.size(); ++i) ++counts[i], ++load[i], --left;
    for (; left > 0; --left) {
      const auto least = static_cast<size_t>(std::ranges::min_element(load) - load.begin());
      ++counts[least];
      ++load[least];
    }
    return counts;
  }

  void weigh(TriedLayout& candidate, const plan::Layout& layout, const plan::LayerTimes& layers) {
    ++result_.candidates;
    candidate.bytes = memory_.bytes(base_, model_, layout);
    if (result_.least_memory == 0 || candidate.bytes < static_cast<double>(result_.least_memory)) {
      result_.least_memory = static_cast<int64_t>(candidate.bytes);
      smallest_ = candidate;
    }
    if (candidate.bytes > kSlack * static_cast<double>(limit_)) {
      ++result_.too_large;
      return;
    }
    candidate.seconds =
        plan::step_time(shape_, layout, cluster_, layers, plan::Pipelined::estimated).total();
    fitting_.push_back(candidate);
  }

  // The fastest by estimates, and the front of time and memory.
  void plan_exactly() {
    if (result_.candidates > 0) result_.smallest = layout_flags(config_of(smallest_));
    const auto ranked = [&](const TriedLayout& each) {
      const bool risky = each.bytes > kSafePart * static_cast<double>(limit_);
      return each.seconds * (risky ? kRisk : 1);
    };
    std::ranges::sort(fitting_, {}, ranked);
    double least = std::numeric_limits<double>::infinity();
    size_t exact = 0;
    for (const TriedLayout& each : fitting_) {
      const bool on_front = each.bytes < 0.98 * least;
      if (exact >= kExact && !on_front) continue;
      const TrainConfig config = config_of(each);
      if (!allowed([&] {
            config.validate(each.world);
            validate_tensor(config, model_);
          }))
        continue;
      ++exact;
      least = std::min(least, each.bytes);
      Prediction found = predict(config, model_, each.world, cluster_);
      if (found.memory > limit_) {
        ++result_.too_large;
      } else {
        result_.best.push_back(std::move(found));
      }
    }
    std::ranges::stable_sort(result_.best, {},
                             [&](const Prediction& each) { return ranked_time(each, limit_); });
  }

  const TrainConfig& base_;
  const ModelSpec& model_;
  const Origins& origins_;
  const plan::Cluster& cluster_;
  plan::ModelShape shape_;
  int64_t limit_;
  int largest_ = 0;  // number of ranks
  SearchResult result_;
  TriedLayout smallest_;
  std::vector<TriedLayout> fitting_;
  QuickMemory memory_;
  std::map<std::pair<int, int64_t>, std::vector<PipelineChoice>> pipelines_;
  std::map<int, std::pair<bool, std::vector<int>>> equal_;
  std::map<std::tuple<int, int, int, int64_t, Recompute>, std::vector<int>> balanced_;
};

}  // namespace

int64_t memory_limit(const TrainConfig& config, const plan::Cluster& cluster) {
  return config.memory.max_per_device > 0 ? config.memory.max_per_device
                                          : static_cast<int64_t>(cluster.device.memory);
}

double ranked_time(const Prediction& prediction, int64_t limit) {
  const bool risky =
      static_cast<double>(prediction.memory) > kSafePart * static_cast<double>(limit);
  return prediction.time.total() * (risky ? kRisk : 1);
}

SearchResult search_layouts(const TrainConfig& config, const ModelSpec& model,
                            const Origins& origins, const std::vector<int>& worlds,
                            const plan::Cluster& cluster) {
  require(!config.train.fit,
          "train.recompute is fit, but layouts are compared with none, selective and full; leave "
          "it out, and give fit to the run");
  validate_context(config);
  const int cp = config.parallel.cp;
  require(std::ranges::any_of(worlds, [cp](int world) { return world % cp == 0; }),
          format("parallel.cp is {}, must divide the number of ranks: {}", cp, join(worlds, ", ")));
  return Search(config, model, origins, cluster).run(worlds);
}

std::string layout_flags(const TrainConfig& config) {
  const LayoutConfig& parallel = config.parallel;
  std::string text = format("--parallel.dp {} --parallel.tp {} --parallel.pp {}", parallel.dp,
                            parallel.tp, parallel.pp);
  const auto add = [&](bool given, const char* key, const auto& value) {
    if (given) text += format(" --{} {}", key, value);
  };
  add(parallel.cp > 1, "parallel.cp", parallel.cp);
  add(parallel.context.has_value(), "parallel.context",
      config.attends_in_ring() ? "ring" : "gather");
  add(parallel.order != Order::pp_fastest, "parallel.order", layout::name_of(parallel.order));
  add(parallel.shard != ShardingStrategy::no_shard, "parallel.shard", name_of(parallel.shard));
  add(parallel.shard_size > 0, "parallel.shard_size", parallel.shard_size);
  add(parallel.pp > 1 && parallel.schedule.has_value(), "parallel.schedule",
      parallel.schedule ? layout::name_of(*parallel.schedule) : "");
  add(parallel.chunks > 1, "parallel.chunks", parallel.chunks);
  add(!parallel.split.empty(), "parallel.split", join(parallel.split, ","));
  add(parallel.sequence_parallel, "parallel.sequence_parallel", "true");
  add(true, "train.micro_batch", config.train.micro_batch);
  add(config.train.global_batch > 0, "train.global_batch", config.train.global_batch);
  add(config.recompute() != Recompute::none, "train.recompute",
      layout::name_of(config.recompute()));
  add(config.offload.optimizer, "offload.optimizer", "true");
  return text;
}

std::vector<size_t> pareto_front(const std::vector<Prediction>& predictions) {
  std::vector<size_t> order(predictions.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return predictions[i].time.total(); });
  std::vector<size_t> front;
  for (const size_t i : order) {
    if (front.empty() || predictions[i].memory < predictions[front.back()].memory)
      front.push_back(i);
  }
  return front;
}

}  // namespace lockstep::config
