// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/plan/answer.h"

#include <cmath>

#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

double rounded(double value) { return std::round(value * 1e4) / 1e4; }
double in_ms(double seconds) { return rounded(seconds * 1e3); }

std::string schedule_name(const plan::Layout& layout) {
  return layout.dims.pp > 1 ? std::string(layout::name_of(layout.schedule)) : "none";
}

// "17x3 14x2 3": stages that follow each other with as many layers.
std::string split_text(const std::vector<int>& layers) {
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t same = i;
    while (same < layers.size() && layers[same] == layers[i]) ++same;
    text += format("{}{}{}", text.empty() ? "" : " ",
                   same - i > 1 ? format("{}x", same - i) : std::string(), layers[i]);
    i = same;
  }
  return text;
}

}  // namespace

Json to_json(const config::Prediction& found, const config::ModelSpec& model,
             const plan::Cluster& cluster) {
  const plan::Layout& layout = found.layout;
  const plan::StepTime& time = found.time;
  const double total = time.total();
  Json json;
  json["layout"] = {
      {"dp", layout.dims.dp / layout.cp},
      {"cp", layout.cp},
      {"tp", layout.dims.tp},
      {"pp", layout.dims.pp},
      {"order", layout::name_of(layout.order)},
      {"shard", layout::name_of(layout.shard)},
      {"shard_size", layout.shards},
      {"schedule", schedule_name(layout)},
      {"chunks", layout.chunks},
      {"split", layout.layers_per_stage},
      {"micro_batch", layout.micro_batch},
      {"recompute", layout::name_of(layout.recompute)},
      {"sequence_parallel", layout.sequence_parallel},
      {"offload", layout.offload_params || layout.offload_grads || layout.offload_optimizer}};
  json["ranks"] = found.world;
  json["step_ms"] = in_ms(total);
  json["tokens_per_s"] = rounded(found.tokens_per_second());
  json["memory_bytes"] = found.memory;
  json["split"] = {{"compute_ms", in_ms(time.compute + time.host)},
                   {"communication_ms", in_ms(time.communication())},
                   {"bubble_ms", in_ms(time.bubble)},
                   {"optimizer_ms", in_ms(time.optimizer)},
                   {"data_ms", 0.0},
                   {"checkpoint_ms", 0.0},
                   {"stall_ms", in_ms(time.fixed)}};
  json["communication"] = {{"tensor_ms", in_ms(time.tensor)},
                           {"context_ms", in_ms(time.context)},
                           {"data_parallel_ms", in_ms(time.data)},
                           {"pipeline_ms", in_ms(time.pipeline)},
                           {"gather_ms", in_ms(time.gather)}};
  json["host_bound_ms"] = in_ms(time.host);
  const plan::ModelShape shape = config::shape_of(model);
  json["mfu"] = rounded(plan::mfu(shape, layout, cluster, total));
  json["hfu"] = rounded(plan::hfu(shape, layout, cluster, total));
  json["interval_ms"] = {in_ms(total * (1 - cluster.error)), in_ms(total * (1 + cluster.error))};
  json["cluster"] = {{"name", cluster.name}, {"note", cluster.note}};
  return json;
}

std::string short_text(const config::Prediction& found) {
  const plan::Layout& layout = found.layout;
  std::string text = found.config.describe_dims(found.world);
  if (layout.order != layout::Order::pp_fastest)
    text += format(", {}", layout::name_of(layout.order));
  if (layout.shard != layout::ShardingStrategy::no_shard)
    text += format(", shard {}", layout::name_of(layout.shard));
  if (layout.shard == layout::ShardingStrategy::hybrid_shard) text += format(" {}", layout.shards);
  if (layout.dims.pp > 1) text += format(", {}", schedule_name(layout));
  if (layout.chunks > 1) text += format(" x {}", layout.chunks);
  if (!found.config.parallel.split.empty())
    text += format(", split {}", split_text(layout.layers_per_stage));
  text += format(", micro-batch {}", layout.micro_batch);
  if (layout.recompute != layout::Recompute::none)
    text += format(", recompute {}", layout::name_of(layout.recompute));
  if (layout.sequence_parallel) text += ", sequence parallel";
  if (found.config.offload.any()) text += ", offload";
  return text;
}

std::string seconds_text(double seconds) {
  return seconds < 0.01  ? format("{:.2f} ms", seconds * 1e3)
         : seconds < 1   ? format("{:.1f} ms", seconds * 1e3)
         : seconds < 100 ? format("{:.2f} s", seconds)
                         : format("{:.0f} s", seconds);
}

std::vector<Part> parts_of(const plan::StepTime& time) {
  return {{"compute", time.compute},
          {"tensor-parallel", time.tensor},
          {"keys and values", time.context},
          {"gathers of parameters", time.gather},
          {"reduction of gradients", time.data},
          {"messages between stages", time.pipeline},
          {"bubble", time.bubble},
          {"optimizer", time.optimizer},
          {"host-bound", time.host},
          {"fixed", time.fixed}};
}

std::vector<Sensitivity> sensitivity(const config::Prediction& found,
                                     const config::ModelSpec& model, const plan::Cluster& cluster) {
  const plan::ModelShape shape = config::shape_of(model);
  std::vector<Sensitivity> list;
  const auto add = [&](const char* change, const auto& edit) {
    plan::Cluster other = cluster;
    edit(other);
    const double seconds = plan::step_time(shape, found.layout, other).total();
    list.push_back({change, seconds / found.time.total() - 1});
  };
  add("twice the peak of the device", [](plan::Cluster& c) { c.device.flops *= 2; });
  add("twice the bandwidth of memory", [](plan::Cluster& c) { c.device.bandwidth *= 2; });
  const auto faster = [](plan::Cluster& c, bool network) {
    (network ? c.links.network_bandwidth : c.links.host_bandwidth) *= 2;
    if (network) c.links.network_latency /= 2;
    for (plan::MeasuredCollective& each : c.links.measured) {
      if ((each.group.hosts > 1) == network) each.seconds /= 2;
    }
  };
  add("twice the network", [&](plan::Cluster& c) { faster(c, true); });
  add("twice the links inside a host", [&](plan::Cluster& c) { faster(c, false); });
  add("no launch times", [](plan::Cluster& c) { c.efficiency.launch = 0; });
  return list;
}

}  // namespace lockstep::cli
