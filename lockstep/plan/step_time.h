// SPDX-License-Identifier: Apache-2.0
// How long a training step takes, and which parts it consists of. Private: not installed.
//
// The unit is one layer on one rank with one micro-batch. Stages are sums of layers, a schedule is
// a simulation of stages, and a step is the schedule with what is exposed around it: reductions of
// gradients, the update, gathers of parameters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/layout/parallel_config.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/plan/cluster.h"
#include "lockstep/schedule/schedule.h"
#include "lockstep/schedule/simulate.h"

namespace lockstep::plan {

// A transformer.
struct ModelShape {
  int64_t layers = 1, hidden = 1, heads = 1, kv_heads = 1, head_size = 1, ffn = 1, vocab = 1;
  bool gated = false;  // the first product of the MLP has two halves
  bool tied = false;   // head and embedding share a table
  int64_t window = 0;  // of attention; 0: all

  double block_parameters() const;
  double table_parameters() const { return static_cast<double>(vocab * hidden); }
  double parameters() const;
  // FLOP of a token in forward and backward: 6 for each element of a matrix, and 12 x layers x
  // width of all heads x sequence for attention, causal or not.
  double flops_per_token(int64_t sequence) const;
};

// All that decides how long a step of the model takes on a cluster.
struct Layout {
  layout::ParallelDims dims = {};
  layout::Order order = layout::Order::pp_fastest;
  layout::ShardingStrategy shard = layout::ShardingStrategy::no_shard;
  int shards = 1;  // data-parallel ranks that share state
  layout::PipelineSchedule schedule = layout::PipelineSchedule::one_f_one_b;
  int chunks = 1, group = 0;
  std::string schedule_file = {};
  std::vector<int> layers_per_stage = {};  // with a pipeline; embedding and head count as layers
  int64_t sequence = 1, micro_batch = 1, micro_batches = 1;
  int64_t rows = 0;  // of a step, where some ranks have fewer micro-batches; 0: all have as many
  layout::Recompute recompute = layout::Recompute::none;
  std::vector<layout::Recompute> recompute_of_blocks = {};  // where they differ
  bool sequence_parallel = false;
  bool tiles = false;  // MLP and head compute long rows in tiles, and again in backward
  // Ranks that share rows, of those on the axis dp, and whether keys and values go around a ring.
  int cp = 1;
  bool ring = false;
  bool offload_params = false, offload_grads = false, offload_optimizer = false;
  double element = 2;  // bytes of a parameter
  double moment = 4;   // of a moment
  // Of products in 8 bits the smallest size; none: no product.
  std::optional<int64_t> fp8_min = std::nullopt;

  int64_t tokens() const {
    return sequence * (rows > 0 ? rows : micro_batch * micro_batches * dims.dp / cp);
  }
  // Of one micro-batch, on each rank.
  int64_t local_tokens() const { return sequence / cp * micro_batch; }
  bool operator==(const Layout&) const = default;
};

// Seconds of a pass over one layer. `host`: what the launches take beyond the device's work.
struct PassTime {
  double compute = 0, tensor = 0, context = 0, gather = 0, host = 0;

  double total() const { return compute + tensor + context + gather + host; }
  PassTime& operator+=(const PassTime& other);
  PassTime operator*(double times) const;
};

struct LayerTime {
  PassTime forward = {}, input = {}, weight = {};
  double parameters = 0;  // elements on a tensor-parallel rank

  PassTime backward() const;
};

// Those of a transformer or, where `each` has any, of layers of any kind in their order.
struct LayerTimes {
  LayerTime embedding = {}, block = {}, head = {};
  std::vector<LayerTime> each = {};
};

LayerTimes layer_times(const ModelShape& model, const Layout& layout, const Cluster& cluster);

// A layer that was timed on one device, with one micro-batch of the layout. Tensor-parallel ranks
// are taken to share its work, and to sum its outputs twice in each direction.
struct MeasuredLayer {
  double forward = 0, backward = 0;  // seconds
  double parameters = 0;             // elements
  double output_bytes = 0;
  double trained = 0;  // of the parameters
};
LayerTimes layer_times(const std::vector<MeasuredLayer>& layers, const Layout& layout,
                       const Cluster& cluster);
// A model of so many such layers, of which one passes at most so many bytes to the next.
ModelShape measured_shape(const std::vector<MeasuredLayer>& layers, const Layout& layout);

// Parts of a step in seconds; they add up to it.
struct StepTime {
  double compute = 0;
  // Exposed communication, by kind. context: keys and values.
  double tensor = 0, context = 0, data = 0, pipeline = 0, gather = 0;
  double bubble = 0, optimizer = 0, host = 0, fixed = 0;

  double communication() const { return tensor + context + data + pipeline + gather; }
  double total() const { return compute + communication() + bubble + optimizer + host + fixed; }
};

enum class Pipelined {
  simulated,  // the schedule that the engine runs
  estimated   // closed forms, for a search
};

StepTime step_time(const ModelShape& model, const Layout& layout, const Cluster& cluster,
                   Pipelined how = Pipelined::simulated);
// The same from layers that were timed before, or measured.
StepTime step_time(const ModelShape& model, const Layout& layout, const Cluster& cluster,
                   const LayerTimes& layers, Pipelined how);

// The schedule of one pipeline of a layout that has one.
struct Timeline {
  schedule::Schedule schedule = {};
  schedule::Simulation simulation = {};
};
Timeline timeline_of(const ModelShape& model, const Layout& layout, const Cluster& cluster);

// Of the ranks of a group on this axis. Every group of an axis has the same shape where hosts have
// equal numbers of ranks.
GroupShape shape_of(const Layout& layout, layout::Axis axis, int devices_per_node);

// Model FLOP, and FLOP with recomputation, in parts of the peak of all devices.
double mfu(const ModelShape& model, const Layout& layout, const Cluster& cluster, double seconds);
double hfu(const ModelShape& model, const Layout& layout, const Cluster& cluster, double seconds);

}  // namespace lockstep::plan
