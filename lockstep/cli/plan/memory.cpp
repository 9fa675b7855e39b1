// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/plan/verbs.h"

#include <algorithm>
#include <iostream>

#include "lockstep/config/freeze.h"
#include "lockstep/config/plan/fit_to_memory.h"
#include "lockstep/config/plan/inventory.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/plan/would_fit.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/core/size_text.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/offload.h"
#include "lockstep/plan/report.h"

namespace lockstep::cli {
namespace {

using config::TrainConfig;
using Words = std::vector<std::string>;

// Memory differs: libraries and kernels of the GPU keep other data than the CPU's.
std::string device_line(const TrainConfig& config, bool cuda) {
  if (config.train.device != config::DeviceKind::automatic)
    return format("device {}", cuda ? "cuda" : "cpu");
  return format("device {}, as this machine's train.device auto; --train.device {} plans for {}",
                cuda ? "cuda" : "cpu", cuda ? "cpu" : "cuda", cuda ? "a CPU" : "a GPU");
}

// Empty where all parameters are trained.
std::string freeze_line(const TrainConfig& config, const config::ModelSpec& model) {
  const auto frozen = config::frozen_tensors(config, model);
  if (frozen.empty()) return "";
  int64_t elements = 0;
  for (const config::TensorSpec& tensor : model.tensors())
    elements += frozen.contains(tensor.name) ? layout::numel_of(tensor.shape) : 0;
  return format(
      "frozen: {} with {} elements, without gradients and optimizer state; activations are "
      "an upper bound, counted as if all parameters were trained\n",
      counted(static_cast<int64_t>(frozen.size()), "tensor"), elements);
}

// With the budgets that the plan assumes.
std::string describe(const layout::OffloadOptions& offload) {
  return layout::resolved(offload, 0, 0).describe();
}

std::string doubts(bool cuda) {
  return format("; predictions may be 7 % low{}",
                cuda ? ", and a CUDA context takes about 0.5 GB in addition" : "");
}

}  // namespace

int plan_memory(const Words& arguments) {
  const auto request = read_request(arguments);
  if (!request) return 0;
  const auto& [given, model, world, origins] = *request;
  config::TrainConfig config = given;
  require(!config.train.fit || config.memory.max_per_device > 0,
          "train.recompute fit needs to know what it must fit in: give memory.max_per_device");
  config::fit_to_memory(config, model, world, config.memory.max_per_device);
  const plan::Run run = config::planned_run(config, model, world);
  const std::vector<plan::Memory> ranks = plan::memory_per_rank(run);
  std::cout
      << plan::to_table(ranks) << layout_text(config, model, world) << "\n"
      << "parameters: "
      << config::model_parameters(model.tensors(), config::element_bytes_of(config)).describe()
      << "\n"
      << device_line(config, run.cuda) << "\n"
      << freeze_line(config, model);
  if (config.train.fit) std::cout << config::describe_fit(*config.train.fit, model.layers) << "\n";
  if (config.offload.any())
    std::cout << describe(config.offload) << "\n" << plan::offload_line(ranks) << "\n";
  const int64_t limit = config.memory.max_per_device;
  const size_t rank = plan::largest_total(ranks);
  const std::string most = format("rank {} takes most, {}", rank, size_text(ranks[rank].total()));
  if (limit == 0) {
    std::cout << most << "; memory.max_per_device sets no limit\n";
    return 0;
  }
  const bool fits = ranks[rank].total() <= limit;
  const bool barely = fits && ranks[rank].total() > config::safe_part_of(limit);
  std::cout << format("{}: {}, memory.max_per_device is {}{}\n",
                      barely ? "fits barely"
                      : fits ? "fits"
                             : "does not fit",
                      most, size_text(limit), barely ? doubts(run.cuda) : "");
  if (fits) return 0;
  if (const auto change = config::would_fit(config, model, world)) {
    std::cout << format("would fit: {} ({})\n", change->flags, size_text(change->bytes));
  } else {
    std::cout << "would fit: no sharding, recomputation, offload or larger number of ranks that "
                 "was tried; use a smaller model, train.seq_len or train.micro_batch\n";
  }
  return 1;
}

int plan_inventory(Words arguments) {
  const bool list = std::erase(arguments, "--list") > 0;
  const auto request = read_request(arguments);
  if (!request) return 0;
  const auto& [config, model, world, origins] = *request;
  const int64_t element = config::element_bytes_of(config);
  const auto tensors = model.tensors();
  if (list)
    std::cout << config::tensor_list(config, model, world) << config::group_list(config, world);
  std::cout << config::inventory_table(tensors, element) << layout_text(config, model, world)
            << "\n";
  if (config.offload.any())
    std::cout << describe(config.offload) << "\nrank 0:\n"
              << plan::to_text(plan::plan_offload(config::planned_run(config, model, world), 0));
  return 0;
}

}  // namespace lockstep::cli
