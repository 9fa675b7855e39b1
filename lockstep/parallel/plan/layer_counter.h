// SPDX-License-Identifier: Apache-2.0
// Builds layers by themselves, runs them, and notes what they are and what they allocate. Private:
// not installed.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/intercept/recording.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/plan/layer_trace.h"
#include "lockstep/parallel/plan/trace_cost.h"
#include "lockstep/parallel/shard/units.h"
#include "lockstep/parallel/tensor/tensor.h"

namespace lockstep::parallel::detail {

// What a layer turned out to be: traces and outputs for each number of rows.
struct CountedLayer {
  std::string name;
  std::vector<LayerTraces> traces;
  std::vector<Trace> forwards;
  std::vector<PassedTensors> outputs;
  std::vector<NamedTensor> parameters;  // of the meta device: shapes alone
  std::set<size_t> sparse_places;       // of parameters with sparse gradients, and their names
  std::set<std::string> sparse;
  std::vector<UnitPlan> units;
  int64_t buffers = 0;
  bool on_meta = false;
};

// Modules and inputs, as far as they can be seen from outside: layers with the same are alike.
std::string signature(const torch::nn::Module& root, const std::vector<PassedTensors>& inputs);

struct CountOptions {
  const PipelineOptions& pipeline;
  const MemoryOptions& how;
  bool halves = false;  // the schedule has backwards in two halves
};

// On one tensor-parallel rank: all of them count the same layers in the same order. Collective.
class LayerCounter {
 public:
  LayerCounter(const CountOptions& options, comm::Group group);

  // `inputs`: one set for each number of rows.
  CountedLayer count(const Layer& layer, size_t index, bool is_last,
                     const std::vector<PassedTensors>& inputs);

 private:
  void run(CountedLayer& counted, const torch::nn::Module& root, bool existed, TracedLayer layer,
           const std::vector<PassedTensors>& inputs);
  void run_on(CountedLayer& counted, const torch::nn::Module& root, const TracedLayer& layer,
              const std::vector<PassedTensors>& inputs);

  const CountOptions& options_;
  TensorParallel tensor_;
  std::map<std::string, CountedLayer> seen_;
};

}  // namespace lockstep::parallel::detail
