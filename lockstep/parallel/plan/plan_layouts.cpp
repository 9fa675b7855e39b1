// SPDX-License-Identifier: Apache-2.0
// Layers are timed once; what a layout makes of these times is the arithmetic of plan/.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/core/size_text.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/plan/layer_counter.h"
#include "lockstep/parallel/plan/same_random_numbers.h"
#include "lockstep/plan/report.h"
#include "lockstep/plan/step_time.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::parallel {
namespace detail {
namespace {

using layout::PipelineSchedule;
using layout::ShardingStrategy;

constexpr Requirement require_plan("plan_layouts");
constexpr int kSamples = 5;
constexpr double kEnough = 0.1;  // seconds of samples

// While it lives, the module's tensors are copies on the device that is timed.
class Moved {
 public:
  Moved(const torch::nn::Module& module, c10::Device device, bool bfloat16) {
    std::set<const c10::TensorImpl*> seen;
    const auto move = [&](at::Tensor tensor) {
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
      const at::Tensor real = tensor.detach();
      real_.push_back({tensor, real, tensor.grad()});
      const auto dtype = bfloat16 && real.is_floating_point() ? at::kBFloat16 : real.scalar_type();
      tensor.mutable_grad().reset();
      tensor.set_data(real.to(device, dtype, /*non_blocking=*/false, /*copy=*/true));
    };
    for (const at::Tensor& parameter : module.parameters()) move(parameter);
    for (const at::Tensor& buffer : module.buffers()) move(buffer);
  }
  ~Moved() {
    for (auto& [tensor, real, gradient] : real_) {
      tensor.mutable_grad().reset();
      tensor.set_data(real);
      tensor.mutable_grad() = gradient;
    }
  }
  Moved(const Moved&) = delete;
  Moved& operator=(const Moved&) = delete;

 private:
  struct Real {
    at::Tensor tensor, real, gradient;
  };
  std::vector<Real> real_;
};

// Of one layer, for each number of rows.
struct TimedLayer {
  std::vector<plan::MeasuredLayer> times;
  std::vector<Tensors> outputs;
};

class LayerTimer {
 public:
  LayerTimer(c10::Device device, bool bfloat16, const MemoryOptions& how)
      : device_(device), bfloat16_(bfloat16), how_(how) {}

  // The example with these numbers of rows, where the layers are timed.
  std::vector<Tensors> inputs_of(const Tensors& example, const std::vector<int64_t>& rows) const {
    std::vector<Tensors> inputs;
    for (const int64_t count : rows) {
      inputs.emplace_back();
      for (const at::Tensor& tensor : example) {
        require_plan(
            tensor.defined() && tensor.dim() > how_.batch_dim && tensor.size(how_.batch_dim) > 0,
            format("an example input has sizes ({}), must have rows in dimension {}",
                   tensor.defined() ? join(tensor.sizes()) : "", how_.batch_dim));
        const at::Tensor index =
            at::arange(count, at::TensorOptions().dtype(at::kLong).device(tensor.device()))
                .remainder(tensor.size(how_.batch_dim));
        inputs.back().push_back(
            tensor.detach().index_select(how_.batch_dim, index).to(device_, dtype_of(tensor)));
      }
    }
    return inputs;
  }

  TimedLayer time(const Layer& layer, bool is_first, bool is_last,
                  const std::vector<Tensors>& inputs) {
    const auto root = std::make_shared<torch::nn::Module>("layer");
    const LayerForward forward = layer.build(*root);
    const bool may_be_alike = !is_last && !root->parameters().empty();
    std::string looks;
    if (may_be_alike) {
      std::vector<PassedTensors> passed;
      for (const Tensors& each : inputs) {
        passed.emplace_back();
        for (const at::Tensor& tensor : each) passed.back().push_back(PassedTensor::of(tensor));
      }
      looks = signature(*root, passed);
      if (const auto found = seen_.find(looks); found != seen_.end()) return found->second;
    }
    TimedLayer timed;
    double parameters = 0, trained = 0;
    for (const at::Tensor& parameter : root->parameters()) {
      parameters += static_cast<double>(parameter.numel());
      trained += parameter.requires_grad() ? static_cast<double>(parameter.numel()) : 0;
    }
    const Moved moved(*root, device_, bfloat16_);
    for (const Tensors& each : inputs) {
      timed.outputs.emplace_back();
      timed.times.push_back(time_of(forward, each, is_first, is_last, timed.outputs.back()));
      timed.times.back().parameters = parameters;
      timed.times.back().trained = trained;
    }
    if (may_be_alike) seen_[looks] = timed;
    return timed;
  }

 private:
  at::ScalarType dtype_of(const at::Tensor& tensor) const {
    return bfloat16_ && tensor.is_floating_point() ? at::kBFloat16 : tensor.scalar_type();
  }
  void finish() const {
    if (device_.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device_.type());
    guard.synchronizeStream(guard.getStream(device_));
  }

  plan::MeasuredLayer time_of(const LayerForward& forward, const Tensors& inputs, bool is_first,
                              bool is_last, Tensors& outputs) const {
    Tensors leaves;
    for (const at::Tensor& input : inputs) {
      leaves.push_back(input.detach());
      if (!is_first && input.is_floating_point()) leaves.back().requires_grad_();
    }
    std::vector<double> forwards, backwards;
    double spent = 0;
    // The first is not counted: it makes what later ones reuse.
    for (int i = 0; i <= kSamples || (spent < kEnough && i < 20 * kSamples); ++i) {
      const auto start = Clock::now();
      outputs = forward(leaves);
      Tensors roots;
      if (is_last && how_.loss) {
        roots = {how_.loss(outputs)};
      } else {
        for (const at::Tensor& output : outputs)
          if (output.requires_grad()) roots.push_back(output);
      }
      finish();
      const double computed = seconds_since(start);
      Tensors ones;
      for (const at::Tensor& output : roots) ones.push_back(at::ones_like(output));
      finish();
      const auto back = Clock::now();
      if (!roots.empty()) torch::autograd::backward(roots, ones);
      finish();
      const double returned = seconds_since(back);
      if (i == 0) continue;
      forwards.push_back(computed);
      backwards.push_back(returned);
      spent += computed + returned;
    }
    plan::MeasuredLayer measured{.forward = median(forwards), .backward = median(backwards)};
    for (at::Tensor& output : outputs) {
      output = output.detach();
      measured.output_bytes += static_cast<double>(output.nbytes());
    }
    return measured;
  }
  static double median(std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::ranges::nth_element(values, middle);
    return *middle;
  }

  c10::Device device_;
  bool bfloat16_;
  const MemoryOptions& how_;
  std::map<std::string, TimedLayer> seen_;
};

// Times are linear in the rows of a micro-batch.
std::vector<plan::MeasuredLayer> with_rows(const std::vector<TimedLayer>& layers,
                                           const std::vector<int64_t>& rows, int64_t asked) {
  const double part = rows.size() == 1 ? 0
                                       : static_cast<double>(asked - rows[0]) /
                                             static_cast<double>(rows[1] - rows[0]);
  std::vector<plan::MeasuredLayer> list;
  for (const TimedLayer& layer : layers) {
    const plan::MeasuredLayer &few = layer.times.front(), &many = layer.times.back();
    const auto between = [&](double plan::MeasuredLayer::*which) {
      return std::max(0.0, few.*which + part * (many.*which - few.*which));
    };
    list.push_back({.forward = between(&plan::MeasuredLayer::forward),
                    .backward = between(&plan::MeasuredLayer::backward),
                    .parameters = few.parameters,
                    .output_bytes = between(&plan::MeasuredLayer::output_bytes)});
  }
  return list;
}

// Layers of each stage, so that the slowest stage is as fast as it can be.
std::vector<int> balanced(const std::vector<plan::MeasuredLayer>& layers, int stages) {
  const size_t count = layers.size();
  std::vector<double> until(count + 1, 0);  // seconds of the layers before
  for (size_t i = 0; i < count; ++i)
    until[i + 1] = until[i] + layers[i].forward + layers[i].backward;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // slowest[s][n]: of the first n layers in s stages; cut[s][n]: where the last of them begins.
  const auto rows = static_cast<size_t>(stages) + 1;
  std::vector<std::vector<double>> slowest(rows, std::vector<double>(count + 1, kNever));
  std::vector<std::vector<size_t>> cut(rows, std::vector<size_t>(count + 1, 0));
  slowest[0][0] = 0;
  for (size_t s = 1; s < rows; ++s) {
    for (size_t n = s; n <= count; ++n) {
      for (size_t begin = s - 1; begin < n; ++begin) {
        const double time = std::max(slowest[s - 1][begin], until[n] - until[begin]);
        if (time < slowest[s][n]) {
          slowest[s][n] = time;
          cut[s][n] = begin;
        }
      }
    }
  }
  std::vector<int> split(static_cast<size_t>(stages));
  size_t end = count;
  for (size_t s = rows - 1; s > 0; --s) {
    split[s - 1] = static_cast<int>(end - cut[s][end]);
    end = cut[s][end];
  }
  return split;
}

std::vector<int> divisors(int number) {
  std::vector<int> list;
  for (int i = 1; i <= number; ++i)
    if (number % i == 0) list.push_back(i);
  return list;
}

struct PipelineChoice {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int chunks = 1;
};
constexpr PipelineChoice kPipelines[] = {{PipelineSchedule::one_f_one_b, 1},
                                         {PipelineSchedule::zb_h1, 1},
                                         {PipelineSchedule::interleaved, 2}};

// All layouts, timed.
class Candidates {
 public:
  Candidates(const ParallelConfig& config, int batch, int layers, int64_t optimizer_bytes,
             const plan::Cluster& cluster)
      : config_(config),
        batch_(batch),
        layers_(layers),
        optimizer_bytes_(optimizer_bytes),
        cluster_(cluster) {}

  std::vector<PlannedLayout> of(int ranks, const std::vector<TimedLayer>& layers,
                                const std::vector<int64_t>& rows) {
    for (const int tp : config_.tensor_plan.empty() ? std::vector<int>{1} : divisors(ranks)) {
      if (ranks % tp != 0) continue;
      for (const int pp : divisors(ranks / tp)) {
        const int dp = ranks / tp / pp;
        if (pp > layers_ || batch_ % dp != 0) continue;
        for (const int micro : divisors(batch_ / dp)) {
          if (micro > config_.micro_batch_size) break;
          add({dp, tp, pp}, micro, with_rows(layers, rows, micro));
        }
      }
    }
    std::ranges::stable_sort(found_, {}, &PlannedLayout::step_seconds);
    return std::move(found_);
  }

 private:
  void add(const layout::ParallelDims& dims, int micro,
           const std::vector<plan::MeasuredLayer>& layers) {
    ParallelConfig config = config_;
    config.dims = dims;
    config.micro_batch_size = micro;
    config.global_batch_size = batch_;
    std::vector<ShardingStrategy> shardings{config_.sharding};
    if (config_.sharding == ShardingStrategy::no_shard && dims.dp > 1)
      shardings.insert(shardings.end(),
                       {ShardingStrategy::optimizer, ShardingStrategy::full_shard});
    for (const ShardingStrategy sharding : shardings) {
      config.sharding = sharding;
      if (dims.pp == 1) {
        add(config, layers);
        continue;
      }
      for (const PipelineChoice& pipeline : kPipelines) {
        const int stages = dims.pp * pipeline.chunks;
        const schedule::ScheduleOptions options{.kind = pipeline.schedule,
                                                .ranks = dims.pp,
                                                .microbatches = config.microbatches(),
                                                .chunks = pipeline.chunks};
        if (stages > layers_ || !is_valid([&] { schedule::require_valid(options); })) continue;
        config.schedule = pipeline.schedule;
        config.advanced.chunks = pipeline.chunks;
        config.advanced.layer_split = balanced(layers, stages);
        add(config, layers);
      }
    }
  }

  void add(const ParallelConfig& config, const std::vector<plan::MeasuredLayer>& layers) {
    if (!is_valid([&] { config.validate(config.dims.world_size()); })) return;
    const bool shards = config.sharding != ShardingStrategy::no_shard;
    plan::Layout layout{.dims = config.dims,
                        .order = config.advanced.order,
                        .shard = config.sharding,
                        .shards = shards ? config.dims.dp : 1,
                        .schedule = config.schedule,
                        .chunks = config.chunks(),
                        .layers_per_stage = config.advanced.layer_split,
                        .micro_batch = config.micro_batch_size,
                        .micro_batches = config.microbatches(),
                        .recompute = config.recompute(),
                        .sequence_parallel = config.advanced.sequence_parallel,
                        .element = config.mixed_precision ? 2.0 : 4.0};
    const double seconds =
        plan::step_time(plan::measured_shape(layers, layout), layout, cluster_,
                        plan::layer_times(layers, layout, cluster_), plan::Pipelined::simulated)
            .total();
    found_.push_back(
        {.config = config, .step_seconds = seconds, .memory_bytes = state_bytes(config, layers)});
  }

  // Of the average rank, without activations: no rank that takes most takes less.
  int64_t state_bytes(const ParallelConfig& config,
                      const std::vector<plan::MeasuredLayer>& layers) const {
    double parameters = 0, trained = 0;
    for (const plan::MeasuredLayer& layer : layers) {
      parameters += layer.parameters;
      trained += layer.trained;
    }
    const double dp = config.dims.dp;
    const bool whole = config.sharding == ShardingStrategy::no_shard ||
                       config.sharding == ShardingStrategy::optimizer;
    const bool states = config.sharding == ShardingStrategy::no_shard;
    const double bytes = 4 * (parameters + trained) / (whole ? 1 : dp) +
                         static_cast<double>(optimizer_bytes_) * trained / (states ? 1 : dp);
    return static_cast<int64_t>(bytes / config.dims.tp / config.dims.pp);
  }

  template <class Check>
  static bool is_valid(const Check& check) {
    try {
      check();
    } catch (const ConfigError&) {
      return false;
    }
    return true;
  }

  const ParallelConfig& config_;
  int batch_, layers_;
  int64_t optimizer_bytes_;  // of a parameter
  const plan::Cluster& cluster_;
  std::vector<PlannedLayout> found_;
};

}  // namespace
}  // namespace detail

std::vector<PlannedLayout> plan_layouts(const std::vector<Layer>& layers,
                                        const Tensors& example_inputs, const ParallelConfig& config,
                                        const LayoutSearch& how, const PipelineOptions& others) {
  using detail::require_plan;
  require_plan(
      !layers.empty() && !example_inputs.empty() && how.ranks > 0 && how.count > 0 &&
          config.micro_batch_size > 0,
      format("{} layers, {} example inputs, {} ranks, count {} and micro_batch_size {}, "
             "must all be at least 1",
             layers.size(), example_inputs.size(), how.ranks, how.count, config.micro_batch_size));
  const plan::Cluster cluster = config::cluster_for(how.cluster).cluster;
  const int batch =
      config.global_batch_size > 0 ? config.global_batch_size : config.micro_batch_size * how.ranks;
  const int64_t limit = config.advanced.max_memory_per_device > 0
                            ? config.advanced.max_memory_per_device
                            : static_cast<int64_t>(cluster.device.memory);
  const detail::SameRandomNumbers random;
  std::vector<int64_t> rows{config.micro_batch_size};
  if (rows[0] > 1) rows.insert(rows.begin(), std::max<int64_t>(1, rows[0] / 4));
  detail::LayerTimer timer(others.device, config.mixed_precision, how.memory);
  std::vector<Tensors> inputs = timer.inputs_of(example_inputs, rows);
  std::vector<detail::TimedLayer> timed;
  for (size_t i = 0; i < layers.size(); ++i) {
    timed.push_back(timer.time(layers[i], i == 0, i + 1 == layers.size(), inputs));
    inputs = std::exchange(timed.back().outputs, {});
  }
  std::vector<PlannedLayout> fitting;
  int64_t least = 0, tried = 0;
  std::string refused;
  const auto all = detail::Candidates(config, batch, static_cast<int>(layers.size()),
                                      how.memory.optimizer_bytes, cluster)
                       .of(how.ranks, timed, rows);
  for (PlannedLayout candidate : all) {
    if (static_cast<int>(fitting.size()) == how.count) break;
    ++tried;
    if (candidate.memory_bytes > limit) {  // without a look at activations
      least = least == 0 ? candidate.memory_bytes : std::min(least, candidate.memory_bytes);
      continue;
    }
    try {
      const auto ranks =
          memory_of(layers, example_inputs, candidate.config, how.memory, others).ranks;
      candidate.memory_bytes = ranks[plan::largest_total(ranks)].total();
    } catch (const ConfigError& rule) {  // a rule of the model's own, such as heads that tp divides
      refused = rule.what();
      continue;
    }
    if (least == 0 || candidate.memory_bytes < least) least = candidate.memory_bytes;
    if (candidate.memory_bytes <= limit) fitting.push_back(std::move(candidate));
  }
  require_plan(!fitting.empty(),
               least > 0
                   ? format("none of {} layouts of {} fits in {}; the smallest takes {}: use "
                            "more ranks or a smaller model",
                            tried, counted(how.ranks, "rank"), size_text(limit), size_text(least))
                   : format("no layout of {} and {} rows is possible{}", counted(how.ranks, "rank"),
                            batch, refused.empty() ? "" : ": " + refused));
  return fitting;
}

}  // namespace lockstep::parallel
