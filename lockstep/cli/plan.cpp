// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/plan.h"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <optional>

#include "lockstep/config/freeze.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/model_source.h"
#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/plan/inventory.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/plan/would_fit.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/offload.h"
#include "lockstep/plan/report.h"

namespace lockstep::cli {
namespace {

using config::TrainConfig;
using Words = std::vector<std::string>;

constexpr const char* kPlanHelp =
    "Predicts the memory of a training run. Starts no rank and needs no data.\n"
    "Usage: lockstep plan memory [-n N] [--config FILE.toml|.json] [--section.key VALUE ...]\n"
    "       lockstep plan inventory [--list] [-n N] [--config FILE] [--section.key VALUE ...]\n"
    "memory: peak memory of each rank during a step, compared with memory.max_per_device. The exit "
    "status is\n"
    "0 if it fits or there is no limit, else 1; then a change of the layout that fits is named. No "
    "GPU is needed to\n"
    "plan for one: --train.device cuda. 1 GB is 2^30 bytes.\n"
    "inventory: the model's tensors by kind, with statistics, and the tier that offloaded data is "
    "placed in.\n"
    "With --list: every tensor with the ranks that own a shard of it, and the process groups by "
    "id.\n"
    "The options are those of lockstep train. Without -n, the layout determines the number of "
    "ranks.\n";

// The data need not be there; the vocabulary must.
config::ModelSpec model_of(const TrainConfig& config) {
  const bool open = config.model.vocab == 0 && config.model_path.empty();
  return config::resolve_model(config, open ? config::open_tokenizer(config).vocab_size() : 0);
}

std::string describe(const TrainConfig& config, const config::ModelSpec& model, int world) {
  std::string text = format("{} on {} rank{}: {}", model.describe(), world, world > 1 ? "s" : "",
                            config.dims(world).describe());
  if (config.parallel.order != layout::Order::pp_fastest)
    text += format(" in order {}", layout::name_of(config.parallel.order));
  if (config.parallel.shard != layout::ShardingStrategy::no_shard)
    text += format(", shard {}{}", name_of(config.parallel.shard),
                   config.parallel.shard_granularity == layout::ShardGranularity::tensors
                       ? " by whole tensors"
                       : "");
  if (config::is_pipelined(config.parallel)) {
    text += format(", {}", layout::name_of(config::schedule_options(config, world).kind));
    if (config.parallel.chunks > 1) text += format(" with {} chunks", config.parallel.chunks);
  }
  const int count = config.accumulation(world);
  return text + format("; {} micro-batch{} of {} x {} tokens, recompute {}", count,
                       count > 1 ? "es" : "", config.train.micro_batch, config.train.seq_len,
                       layout::name_of(config.recompute()));
}

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

struct Request {
  TrainConfig config;
  config::ModelSpec model;
  int world;
};

// None where only help was asked for.
std::optional<Request> read_request(const Words& arguments) {
  const auto parsed = config::parse_train_arguments(arguments);
  if (parsed.help) {
    std::cout << kPlanHelp;
    return std::nullopt;
  }
  TrainConfig config = parsed.config;
  // A checkpoint of the machine that is planned for need not be here.
  if (const std::string& resume = config.checkpoint.resume;
      parsed.continued.empty() && (std::filesystem::exists(resume) || resume == "none"))
    config::complete_model(config, parsed.origins);
  if (config.data.path.empty()) config.data.path = "any";  // a run must have some
  const int64_t least = layout::ParallelDims{.dp = std::max(1, config.parallel.dp),
                                             .tp = std::max(1, config.parallel.tp),
                                             .pp = std::max(1, config.parallel.pp)}
                            .world_size();
  const int world = parsed.ranks.value_or(static_cast<int>(std::min<int64_t>(least, 1 << 24)));
  config.validate(world);
  const config::ModelSpec model = model_of(config);
  config::validate_tensor(config, model);
  return Request{config, model, world};
}

int plan_memory(const Words& arguments) {
  const auto request = read_request(arguments);
  if (!request) return 0;
  const auto& [config, model, world] = *request;
  const plan::Run run = config::planned_run(config, model, world);
  const std::vector<plan::Memory> ranks = plan::memory_per_rank(run);
  std::cout
      << plan::to_table(ranks) << describe(config, model, world) << "\n"
      << "parameters: "
      << config::model_parameters(model.tensors(), config::element_bytes_of(config)).describe()
      << "\n"
      << device_line(config, run.cuda) << "\n"
      << freeze_line(config, model);
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
  const auto& [config, model, world] = *request;
  const int64_t element = config::element_bytes_of(config);
  const auto tensors = model.tensors();
  if (list)
    std::cout << config::tensor_list(config, model, world) << config::group_list(config, world);
  std::cout << config::inventory_table(tensors, element) << describe(config, model, world) << "\n";
  if (config.offload.any())
    std::cout << describe(config.offload) << "\nrank 0:\n"
              << plan::to_text(plan::plan_offload(config::planned_run(config, model, world), 0));
  return 0;
}

}  // namespace

int plan(const Words& arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
    (arguments.empty() ? std::cerr : std::cout) << kPlanHelp;
    return arguments.empty() ? 2 : 0;
  }
  const Words rest(arguments.begin() + 1, arguments.end());
  if (arguments[0] == "memory") return plan_memory(rest);
  if (arguments[0] == "inventory") return plan_inventory(rest);
  throw ConfigError(format("plan: unknown subcommand '{}'; use memory or inventory", arguments[0]));
}

}  // namespace lockstep::cli
