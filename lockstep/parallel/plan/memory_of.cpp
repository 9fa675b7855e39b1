// SPDX-License-Identifier: Apache-2.0
// Describes what layer_counter finds as a plan::Run. What ranks share, and when, is the arithmetic
// of plan/.
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/pipeline/stage.h"
#include "lockstep/parallel/plan/layer_counter.h"
#include "lockstep/parallel/plan/layer_trace.h"
#include "lockstep/parallel/plan/same_random_numbers.h"
#include "lockstep/parallel/plan/trace_cost.h"
#include "lockstep/plan/report.h"
#include "lockstep/plan/run_description.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::parallel {
namespace detail {
namespace {

// With fewer rows some operators take another way (a vector instead of a matrix), and norms over
// the batch refuse.
constexpr int64_t kFewRows = 2, kMoreRows = 3;

// Rows that are counted, of the rows that are asked for.
std::vector<int64_t> counted_rows(int64_t rows) {
  return rows <= kMoreRows ? std::vector<int64_t>{rows} : std::vector{kFewRows, kMoreRows};
}

PassedTensors example_with(const Tensors& example, int64_t rows, int batch_dim) {
  PassedTensors inputs;
  for (const at::Tensor& tensor : example) {
    if (!tensor.defined() || tensor.dim() <= batch_dim || tensor.size(batch_dim) == 0) {
      throw ConfigError(
          format("[memory_of] an example input has sizes ({}), must have rows in dimension {}",
                 tensor.defined() ? join(tensor.sizes()) : "", batch_dim));
    }
    const at::Tensor index = at::arange(rows, at::kLong).remainder(tensor.size(batch_dim));
    const at::Tensor chosen = tensor.detach().to(at::kCPU).index_select(batch_dim, index);
    inputs.push_back(PassedTensor::of(chosen));
    inputs.back().value = chosen;
  }
  return inputs;
}

std::vector<CountedLayer> count_layers(const std::vector<Layer>& layers,
                                       std::vector<PassedTensors> inputs,
                                       const CountOptions& options, comm::Group group) {
  LayerCounter counter(options, std::move(group));
  std::vector<CountedLayer> counted;
  for (size_t i = 0; i < layers.size(); ++i) {
    counted.push_back(counter.count(layers[i], i, i + 1 == layers.size(), inputs));
    inputs = counted.back().outputs;
    // Only the next layer needs them.
    if (i > 0) {
      for (PassedTensors& each : counted[i - 1].outputs) {
        for (PassedTensor& output : each) output.value.reset();
      }
    }
  }
  return counted;
}

// Of each tensor-parallel rank, for these numbers of rows.
std::vector<std::vector<CountedLayer>> count_on_ranks(const std::vector<Layer>& layers,
                                                      const Tensors& example,
                                                      const std::vector<int64_t>& rows, int tp,
                                                      const CountOptions& options) {
  std::vector<PassedTensors> inputs;
  for (const int64_t each : rows)
    inputs.push_back(example_with(example, each, options.how.batch_dim));
  std::vector<std::vector<CountedLayer>> ranks(static_cast<size_t>(tp));
  if (tp == 1) {
    ranks[0] = count_layers(layers, inputs, options, comm::Group());
  } else {
    // Collectives of layers need peers: threads, for as long as this takes.
    comm::run_threads(tp, [&](const comm::Group& group) {
      ranks[static_cast<size_t>(group.rank())] = count_layers(layers, inputs, options, group);
    });
  }
  return ranks;
}

// The traces for the rows that are asked for; nothing where they cannot be told from these.
std::optional<LayerTraces> traces_for(const CountedLayer& layer, const std::vector<int64_t>& rows,
                                      int64_t asked) {
  if (rows.size() == 1) return layer.traces[0];
  const auto scale = [&](Trace LayerTraces::*which) {
    return scaled(layer.traces[0].*which, layer.traces[1].*which, rows[0], rows[1], asked);
  };
  const auto keeping = scale(&LayerTraces::keeping), adding = scale(&LayerTraces::adding),
             split_keeping = scale(&LayerTraces::split_keeping),
             split_adding = scale(&LayerTraces::split_adding);
  if (!keeping || !adding || !split_keeping || !split_adding) return std::nullopt;
  return LayerTraces{*keeping, *adding, *split_keeping, *split_adding};
}

int64_t passed_bytes(const CountedLayer& layer, const std::vector<int64_t>& rows, int64_t asked) {
  const auto bytes = [&](size_t i) {
    int64_t sum = 0;
    for (const PassedTensor& output : layer.outputs[i]) sum += output.bytes();
    return sum;
  };
  if (rows.size() == 1) return bytes(0);
  return bytes(0) + (bytes(1) - bytes(0)) * (asked - rows[0]) / (rows[1] - rows[0]);
}

// The parameters of a layer as units. `owned`: names that an earlier layer of the stage has;
// `elsewhere`: that one of an earlier stage has; `first`: FullyShardOptions' first_tensors.
std::vector<plan::Unit> units_of(const CountedLayer& layer, const std::set<std::string>& owned,
                                 const std::set<std::string>& elsewhere,
                                 const std::vector<std::string>& first) {
  const auto place_of = [&](const std::string& name) {
    if (const auto reserved = place_among(first, name))
      return static_cast<std::ptrdiff_t>(*reserved) - static_cast<std::ptrdiff_t>(first.size());
    const auto place = std::ranges::find(layer.parameters, name, &NamedTensor::name);
    return place - layer.parameters.begin();
  };
  std::vector<plan::Unit> units;
  for (const UnitPlan& unit : layer.units) {
    const size_t before = units.size();
    for (const optim::NamedParameter& parameter : unit.parameters) {
      if (owned.contains(parameter.name)) continue;
      const plan::Unit kind{.name = unit.name,
                            .element = static_cast<int64_t>(parameter.tensor.element_size()),
                            .trained = parameter.tensor.requires_grad(),
                            .sparse = layer.sparse.contains(parameter.name),
                            .copy = elsewhere.contains(parameter.name)};
      auto found = std::find_if(units.begin() + static_cast<std::ptrdiff_t>(before), units.end(),
                                [&](plan::Unit each) {
                                  each.shapes.clear();
                                  each.places.clear();
                                  return each == kind;
                                });
      if (found == units.end()) found = units.insert(units.end(), kind);
      found->shapes.push_back(parameter.tensor.sizes().vec());
      found->places.push_back(place_of(parameter.name));
    }
  }
  return units;
}

plan::Run described(size_t num_layers, const layout::ParallelDims& dims,
                    const PipelineOptions& options, const MemoryOptions& how) {
  plan::Run run{.dims = dims,
                .order = how.order,
                .micro_batches = options.microbatches,
                .state_bytes = how.optimizer_bytes,
                .cuda = options.device.is_cuda()};
  if (const auto* ddp = std::get_if<DdpOptions>(&options.data)) {
    run.reproducible = ddp->reproducible;
  } else {
    const auto& shard = std::get<FullyShardOptions>(options.data);
    if (std::holds_alternative<HostOffload>(shard.offload)) {
      throw ConfigError(
          "[memory_of] HostOffload keeps everything in host memory, which is not predicted; use "
          "OffloadOptions");
    }
    run.sharding = shard.strategy;
    const bool hybrid = shard.strategy == ShardingStrategy::hybrid_shard;
    const bool whole = shard.strategy == ShardingStrategy::no_shard;
    run.shards = whole                                            ? 1
                 : hybrid && shard.advanced.hybrid_group_size > 0 ? shard.advanced.hybrid_group_size
                                                                  : dims.dp;
    run.granularity = shard.advanced.granularity;
    run.min_sharded = shard.min_num_params;
    run.reproducible = shard.reproducible;
    if (const auto* offload = std::get_if<layout::OffloadOptions>(&shard.offload))
      run.offload = *offload;
  }
  if (dims.pp > 1) {
    run.pipeline = schedule::ScheduleOptions{.kind = options.schedule,
                                             .ranks = dims.pp,
                                             .microbatches = options.microbatches,
                                             .chunks = options.chunks,
                                             .group = options.advanced.group,
                                             .file = options.advanced.schedule_file};
    const int64_t stages = int64_t{dims.pp} * options.chunks;
    const auto split =
        layout::layers_per_stage(static_cast<int64_t>(num_layers), stages, options.split);
    if (!split) {
      throw ConfigError(
          format("[memory_of] {} layers in {} stages (pp {} x chunks {}), must be a multiple, or a "
                 "split must give each stage at least one and have {} in all",
                 num_layers, stages, dims.pp, options.chunks, num_layers));
    }
    run.layers_per_stage = *split;
  }
  return run;
}

bool splits_backward(const plan::Run& run) {
  if (!run.pipeline) return false;
  for (const auto& actions : schedule::generate(*run.pipeline).actions) {
    for (const schedule::Action& action : actions) {
      if (action.op == schedule::Op::backward_input) return true;
    }
  }
  return false;
}

// Fills the model of the run. False where the traces cannot be scaled.
class Describer {
 public:
  Describer(plan::Run& run, const std::vector<std::vector<CountedLayer>>& ranks,
            const std::vector<int64_t>& rows, int64_t asked, OnDisk on_disk,
            const std::vector<std::string>& first_tensors)
      : run_(run),
        ranks_(ranks),
        rows_(rows),
        asked_(asked),
        on_disk_(on_disk),
        first_tensors_(first_tensors) {
    run_.model.reserved = static_cast<int64_t>(first_tensors.size());
  }

  bool describe(ModelMemory& memory) {
    const std::vector<CountedLayer>& first = ranks_[0];
    std::set<std::string> elsewhere;
    for (const plan::Stage& stage : stages()) {
      std::vector<bool> kept_before;
      std::set<std::string> owned;
      for (size_t i = stage.first; i < stage.end(); ++i) {
        const auto traces = traces_for(first[i], rows_, asked_);
        if (!traces) return false;
        const InputPlaces places{
            .counted_before = kept_before, .held = i == stage.first, .on_disk = on_disk_};
        kept_before = kept_outputs(traces->adding, places);
        plan::LayerKind kind{.cost = cost_of(*traces, places), .buffers = first[i].buffers};
        for (const auto& rank : ranks_)
          kind.units.push_back(units_of(rank[i], owned, elsewhere, first_tensors_));
        memory.layers.push_back(of_layer(first[i], kind));
        note_tie(i, owned);
        for (const NamedTensor& parameter : first[i].parameters) owned.insert(parameter.name);
        if (i + 1 == stage.end() && i + 1 < first.size()) {
          run_.model.stream_bytes =
              std::max(run_.model.stream_bytes, passed_bytes(first[i], rows_, asked_));
        }
        run_.model.layers.push_back({.name = format("layer {}: ", i), .kind = i});
        run_.model.kinds.push_back(std::move(kind));
      }
      elsewhere.merge(owned);
    }
    return true;
  }

 private:
  std::vector<plan::Stage> stages() const {
    if (run_.pipeline) return plan::stages_of(run_);
    return {{.first = 0, .count = ranks_[0].size()}};
  }

  // Where the last layer uses parameters of the first, on one rank, the gradient of the one use
  // waits for that of the other.
  void note_tie(size_t index, const std::set<std::string>& owned) {
    if (run_.pipeline || index + 1 != ranks_[0].size()) return;
    std::set<std::string> of_first;
    for (const NamedTensor& parameter : ranks_[0][0].parameters) of_first.insert(parameter.name);
    for (const NamedTensor& parameter : ranks_[0][index].parameters) {
      if (!owned.contains(parameter.name) || !of_first.contains(parameter.name)) continue;
      run_.model.tied = parameter.name;
      run_.model.tied_bytes += static_cast<int64_t>(parameter.tensor.numel()) *
                               static_cast<int64_t>(parameter.tensor.element_size());
    }
  }

  static LayerMemory of_layer(const CountedLayer& counted, const plan::LayerKind& kind) {
    LayerMemory memory{.name = counted.name,
                       .parameters = kind.buffers,
                       .kept = kind.cost.kept,
                       .forward_peak = kind.cost.forward_peak,
                       .backward_peak = kind.cost.backward_peak,
                       .on_meta = counted.on_meta};
    for (const plan::Unit& unit : kind.units[0]) {
      for (const layout::Shape& shape : unit.shapes)
        memory.parameters += layout::numel_of(shape) * unit.element;
    }
    return memory;
  }

  plan::Run& run_;
  const std::vector<std::vector<CountedLayer>>& ranks_;
  const std::vector<int64_t>& rows_;
  int64_t asked_;
  OnDisk on_disk_;
  const std::vector<std::string>& first_tensors_;
};

std::string how_counted(const std::vector<LayerMemory>& layers, const std::vector<int64_t>& rows,
                        int64_t asked) {
  std::vector<size_t> meta, cpu;
  for (size_t i = 0; i < layers.size(); ++i) (layers[i].on_meta ? meta : cpu).push_back(i);
  const auto line = [](const std::vector<size_t>& which, const char* where) {
    if (which.empty()) return std::string();
    return format("layer{} {}: {}; ", which.size() > 1 ? "s" : "", plan::rank_ranges(which), where);
  };
  return line(meta, "meta device") + line(cpu, "CPU") +
         (rows.size() == 1 ? format("with {} row{}", asked, asked == 1 ? "" : "s")
                           : format("scaled from {} and {} rows to {}", rows[0], rows[1], asked));
}

}  // namespace
}  // namespace detail

ModelMemory memory_of(const std::vector<Layer>& layers, const Tensors& example_inputs,
                      const layout::ParallelDims& dims, const PipelineOptions& options,
                      const MemoryOptions& how) {
  dims.validate();
  if (layers.empty() || example_inputs.empty()) {
    throw ConfigError(format("[memory_of] {} layers and {} example inputs, must be at least one",
                             layers.size(), example_inputs.size()));
  }
  if (how.rows < 0 || how.batch_dim < 0) {
    throw ConfigError(format("[memory_of] rows {} and batch_dim {}, must be at least 0", how.rows,
                             how.batch_dim));
  }
  const detail::SameRandomNumbers random;
  const int64_t asked = how.rows > 0 ? how.rows
                        : example_inputs[0].dim() > how.batch_dim
                            ? example_inputs[0].size(how.batch_dim)
                            : 1;
  const bool recomputes = options.advanced.recompute != layout::Recompute::none;
  const detail::OnDisk on_disk = !how.on_disk ? detail::OnDisk::nothing
                                 : recomputes ? detail::OnDisk::inputs
                                              : detail::OnDisk::all;
  const plan::Run empty = detail::described(layers.size(), dims, options, how);
  const detail::CountOptions count{
      .pipeline = options, .how = how, .halves = detail::splits_backward(empty)};
  const auto shard = detail::sharding_of(detail::with_tied_layers(options, layers));
  const auto first_tensors = shard ? shard->advanced.first_tensors : std::vector<std::string>();
  for (const std::vector<int64_t>& rows : {detail::counted_rows(asked), {asked}}) {
    plan::Run run = empty;
    ModelMemory memory;
    const auto ranks = detail::count_on_ranks(layers, example_inputs, rows, dims.tp, count);
    // An operator that takes another way with more rows: all of them, then.
    if (!detail::Describer(run, ranks, rows, asked, on_disk, first_tensors).describe(memory))
      continue;
    memory.ranks = plan::memory_per_rank(run);
    memory.counted = detail::how_counted(memory.layers, rows, asked);
    return memory;
  }
  throw Error("[memory_of] a trace of all rows needs no scaling");
}

ModelMemory memory_of(const std::vector<Layer>& layers, const Tensors& example_inputs,
                      const layout::ParallelConfig& config, MemoryOptions how,
                      PipelineOptions others) {
  how.rows = config.micro_batch_size;
  how.on_disk = config.activations_to_disk();
  how.order = config.advanced.order;
  return memory_of(layers, example_inputs, config.dims,
                   pipeline_options(config, static_cast<int64_t>(layers.size()), std::move(others)),
                   how);
}

}  // namespace lockstep::parallel
