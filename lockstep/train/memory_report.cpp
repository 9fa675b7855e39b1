// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/memory_report.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <new>
#include <string_view>

#include "lockstep/comm/collectives.h"
#include "lockstep/config/plan/fit_to_memory.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/memory/meter.h"
#include "lockstep/train/device/device.h"
#include "lockstep/train/observe/metrics.h"

namespace lockstep::train {

int64_t peak_tensor_bytes(c10::Device device, const TrainedModel* model) {
  if (!device.is_cpu() || !memory::Meter::is_installed()) return peak_bytes(device);
  return memory::Meter::peak() + static_cast<int64_t>(symmetric_memory()) +
         (model != nullptr ? model->arena_bytes() : 0);
}

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  if (dynamic_cast<const CommError*>(&error) != nullptr) return false;  // another rank's
  const std::string_view text = error.what();
  // Exceptions of the allocators have types of their own only in some versions of libtorch.
  constexpr std::array<std::string_view, 4> kSigns{"out of memory", "not enough memory",
                                                   "can't allocate memory", "ALLOC_FAILED"};
  return std::ranges::any_of(
      kSigns, [&](std::string_view sign) { return text.find(sign) != std::string_view::npos; });
}

plan::Memory measure(c10::Device device, const TrainedModel& model, optim::Optimizer& optimizer,
                     bool has_stepped) {
  const auto size = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  };
  plan::Memory memory;
  for (const auto& [name, tensor, parts] : model.parameters()) {
    memory.parameters += size(tensor);
    memory.gradients += size(tensor.grad());
  }
  if (has_stepped) {
    for (const auto& [name, tensor] : optimizer.state()) memory.optimizer += size(tensor);
  }
  memory.activations = std::max<int64_t>(0, peak_tensor_bytes(device, &model) - memory.state());
  return memory;
}

config::TrainConfig fitted(config::TrainConfig config, const comm::Group& world) {
  if (!config::chooses_by_memory(config)) return config;
  int64_t limit = config.memory.max_per_device;
  if (limit == 0) {
    const c10::Device device = choose_device(config, world);
    limit = memory::device_bytes(device) / (device.is_cpu() ? world.local_size() : 1);
  }
  at::Tensor least = at::full({1}, limit, at::kLong);
  if (world.backend() == "nccl") least = least.to(choose_device(config, world));
  comm::all_reduce(least, world, {.op = comm::ReduceOp::min}).wait();
  config::fit_to_memory(config, config.model, world.size(), least.item<int64_t>());
  return config;
}

std::string out_of_memory_message(const std::exception& error, const MemoryReport& report) {
  const auto refusal = memory::cuda_refusal();
  const std::string what = refusal ? refusal->what() : error.what();
  std::string text = what.substr(0, what.find('\n'));
  const auto line = [&](const std::string& name, int64_t predicted, int64_t measured) {
    text += format("\n  {:<24}{:>10}{:>10}", name, size_text(predicted), size_text(measured));
  };
  text += format("\n  {:<24}{:>10}{:>10}", format("rank {}", report.rank), "predicted", "measured");
  const plan::Memory &a = report.predicted, &b = report.measured;
  line("parameters", a.parameters, b.parameters);
  line("gradients", a.gradients, b.gradients);
  line("optimizer", a.optimizer, b.optimizer);
  line("activations and buffers", a.activations + a.buffers, b.activations + b.buffers);
  line("total", a.total(), b.total());
  return text;
}

}  // namespace lockstep::train
