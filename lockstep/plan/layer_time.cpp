// SPDX-License-Identifier: Apache-2.0
// Seconds of the passes over one layer: products at a part of the peak that grows with their size,
// all else at a part of the memory's bandwidth, and no less than the host needs to launch it.
#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/plan/step_time.h"

namespace lockstep::plan {
namespace {

using layout::Recompute;
using layout::ShardingStrategy;

// Bytes that a block moves between its products, in forward, for each token: rotations, biases and
// activations. Norms and residuals move Software::stream_bytes.
constexpr double kHeadBytes = 6, kGatedBytes = 3, kPlainBytes = 4;  // elements

constexpr double kFloat8Speed = 1.65;  // of large products, in multiples of 16-bit ones

class LayerClock {
 public:
  LayerClock(const ModelShape& model, const Layout& layout, const Cluster& cluster)
      : model_(model),
        layout_(layout),
        cluster_(cluster),
        tokens_(static_cast<double>(layout.local_tokens())),
        tp_(layout.dims.tp),
        tp_group_(shape_of(layout, layout::Axis::tp, cluster.devices_per_node)),
        shard_group_(shard_shape()) {}

  LayerTime block() const { return block(layout_.recompute); }
  LayerTime block(Recompute recompute) const {
    const double width = static_cast<double>(model_.heads * model_.head_size);
    const double kv = static_cast<double>(model_.kv_heads * model_.head_size);
    const double h = hidden(), f = static_cast<double>(model_.ffn);
    const double mlp = block_product(h, f * (model_.gated ? 2 : 1)) + block_product(f, h);
    const double products = block_product(h, width + 2 * kv) + block_product(width, h) + mlp;
    const double stream =
        cluster_.software.stream_bytes * h / (layout_.sequence_parallel ? tp_ : 1.0);
    const double inside =
        (kHeadBytes * width + (model_.gated ? kGatedBytes : kPlainBytes) * f) / tp_;
    const double moved = memory(tokens_ * layout_.element * (stream + inside));
    const auto [attend, attend_back] = attention(width);

    LayerTime time{.parameters = model_.block_parameters() / tp_};
    time.forward.compute = products + moved + attend;
    time.input.compute = products + 2 * moved + attend_back;
    time.weight.compute = products + accumulate(time.parameters);
    const double stream_bytes = tokens_ * h * layout_.element;
    const double each = layout_.sequence_parallel
                            ? collective(Collective::all_gather, stream_bytes) +
                                  collective(Collective::reduce_scatter, stream_bytes)
                            : collective(Collective::all_reduce, stream_bytes);
    time.forward.tensor = 2 * each;
    time.input.tensor = 2 * each;
    if (layout_.sequence_parallel && cluster_.software.regather)
      time.weight.tensor = 2 * collective(Collective::all_gather, stream_bytes);
    wait(time);
    exchange(time, kv, attend, attend_back);
    double passes = 1;
    if (recompute == Recompute::full) {
      time.input.compute += time.forward.compute;
      time.input.tensor += time.forward.tensor;
      time.input.context += time.forward.context;
      passes = 2;
    } else if (recompute == Recompute::selective) {
      time.input.compute += moved;  // results of products and of attention are kept
      if (!layout_.ring) time.input.context += time.forward.context;
    }
    if (layout_.tiles && recompute != Recompute::full) {
      time.input.compute += mlp;
      time.input.tensor += each;
    }
    if (cluster_.efficiency.launch_adds) {
      time.forward.compute += cluster_.efficiency.launch;
      time.input.compute += (passes + 1) * cluster_.efficiency.launch;
    } else {
      const double latency = each > 0 ? 2 * stream_latency() : 0;
      floor(time.forward, time.forward.total(), 1, latency);
      floor(time.input, time.backward().total(), passes + 1, (passes + 1) * latency);
    }
    share(time);
    return time;
  }

  LayerTime head() const {
    LayerTime time{.parameters = model_.table_parameters() / tp_};
    const double products = product(hidden() * static_cast<double>(model_.vocab));
    const double moved = memory(cluster_.software.logit_bytes * tokens_ *
                                static_cast<double>(model_.vocab) / tp_ / 3);
    time.forward.compute = products + moved;
    time.input.compute = products + 2 * moved;
    time.weight.compute = products + accumulate(time.parameters);
    time.input.tensor = stream_reduction();
    if (layout_.tiles) time.input.compute += time.forward.compute;
    share(time);
    return time;
  }

  LayerTime embedding() const {
    const bool own = !model_.tied || layout_.dims.pp > 1;  // else it is the head's
    LayerTime time{.parameters = own ? model_.table_parameters() / tp_ : 0};
    const double looked_up = memory(3 * tokens_ * hidden() * layout_.element);
    time.forward.compute = looked_up;
    time.weight.compute = looked_up + accumulate(time.parameters);
    time.forward.tensor = stream_reduction();
    share(time);
    return time;
  }

  LayerTime measured(const MeasuredLayer& layer) const {
    LayerTime time{.parameters = layer.parameters / tp_};
    time.forward.compute = layer.forward / tp_;
    time.input.compute = time.weight.compute = layer.backward / 2 / tp_;
    time.forward.tensor = time.input.tensor =
        2 * collective(Collective::all_reduce, layer.output_bytes);
    wait(time);
    if (layout_.recompute == Recompute::full) {
      time.input.compute += time.forward.compute;
      time.input.tensor += time.forward.tensor;
    }
    share(time);
    return time;
  }

 private:
  double hidden() const { return static_cast<double>(model_.hidden); }

  // Of the tokens with this many elements of a matrix, of which each rank has its part.
  double product(double elements) const {
    const double flop = 2 * tokens_ * elements / tp_;
    const Efficiency& efficiency = cluster_.efficiency;
    return (flop + efficiency.product_half) / (cluster_.device.flops * efficiency.product);
  }
  // In 8 bits, which the device multiplies faster. Inputs and gradients of outputs are read twice
  // and written twice, in one third of the products that they are for.
  double block_product(double in, double out) const {
    const double seconds = product(in * out);
    const auto fits = [&](double size) {
      return size >= static_cast<double>(*layout_.fp8_min) && std::fmod(size, 16) == 0;
    };
    if (!layout_.fp8_min || !fits(in) || !fits(out)) return seconds;
    const double bytes = 2 * layout_.element + 2;
    return seconds / kFloat8Speed + memory(bytes * tokens_ * (in + out) / tp_ / 3);
  }
  double memory(double bytes) const {
    return bytes / (cluster_.device.bandwidth * cluster_.efficiency.memory);
  }
  double accumulate(double parameters) const {
    return memory(cluster_.software.accumulate_bytes * parameters);
  }
  double collective(Collective op, double bytes) const {
    return collective_time(cluster_, op, tp_group_, bytes);
  }
  // Of what stands for one all-reduce of the stream.
  double stream_latency() const {
    return layout_.sequence_parallel
               ? collective(Collective::all_gather, 1) + collective(Collective::reduce_scatter, 1)
               : collective(Collective::all_reduce, 1);
  }
  double stream_reduction() const {
    return collective(
        layout_.sequence_parallel ? Collective::reduce_scatter : Collective::all_reduce,
        tokens_ * hidden() * layout_.element);
  }

  // Forward and backward. Positions before the own one are half of the scores.
  std::pair<double, double> attention(double width) const {
    const double length = static_cast<double>(
        model_.window > 0 ? std::min(2 * model_.window, layout_.sequence) : layout_.sequence);
    if (cluster_.software.score_bytes == 0) {
      const double seconds = 2 * tokens_ * length * width / tp_ /
                             (cluster_.device.flops * cluster_.efficiency.attention);
      const double scores =
          cluster_.efficiency.score * tokens_ * length * static_cast<double>(model_.heads) / tp_;
      return {seconds + scores, 2.5 * seconds + 2 * scores};
    }
    const double products = 2 * product(length * width);
    const double scores = memory(cluster_.software.score_bytes * tokens_ * length *
                                 static_cast<double>(model_.heads) / tp_);
    return {products + scores, 2 * (products + scores)};
  }

  // Keys and values of the ranks that share rows, and in backward their gradients in float32. A
  // ring sends them while attention is computed, which slows down by a part of what it hides.
  void exchange(LayerTime& time, double kv, double attend, double attend_back) const {
    const int ranks = layout_.cp;
    if (ranks == 1) return;
    const GroupShape all = shape_of(layout_, layout::Axis::dp, cluster_.devices_per_node);
    const int per_host = std::clamp(all.ranks / all.hosts, 1, ranks);
    const GroupShape group{ranks, (ranks + per_host - 1) / per_host};
    const double elements = 2 * tokens_ * kv / tp_;  // of one rank
    if (!layout_.ring) {
      time.forward.context = collective_time(cluster_, Collective::all_gather, group,
                                             ranks * elements * layout_.element);
      time.input.context = collective_time(cluster_, Collective::reduce_scatter, group,
                                           ranks * elements * std::max(4.0, layout_.element));
      return;
    }
    const auto round = [&](double hops, double bytes) {
      return hops * message_time(cluster_, group.hosts == 1, bytes);
    };
    const auto exposed = [&](double seconds, double hidden_under) {
      const double slow = cluster_.software.slowdown * std::min(seconds, hidden_under);
      return std::max(0.0, seconds - hidden_under) + slow;
    };
    const double keys = round(ranks - 1, elements * layout_.element);
    time.forward.context = exposed(keys, attend);
    time.input.context =
        exposed(keys + round(ranks, elements * std::max(4.0, layout_.element)), attend_back);
  }

  GroupShape shard_shape() const {
    const GroupShape all = shape_of(layout_, layout::Axis::dp, cluster_.devices_per_node);
    const int per_host = std::max(1, all.ranks / all.hosts);
    if (layout_.shards >= all.ranks) return all;
    return {layout_.shards, std::max(1, layout_.shards / per_host)};
  }

  // Kernels and collectives are launched by one thread of the host.
  void floor(PassTime& pass, double work, double passes, double latency) const {
    double least = passes * cluster_.efficiency.launch;
    const bool spans = layout_.dims.pp > 1 && layout_.dims.world_size() > cluster_.devices_per_node;
    if (spans && tp_ > 1 && cluster_.software.pipeline_launch > 0)
      least +=
          passes * cluster_.software.pipeline_launch * tp_ + (tp_group_.hosts > 1 ? latency : 0);
    pass.host = std::max(0.0, least - work);
  }

  // Ranks that share a layer are never equally fast, and meet at every collective.
  void wait(LayerTime& time) const {
    const double part = cluster_.software.waiting * std::log2(tp_);
    for (PassTime* pass : {&time.forward, &time.input, &time.weight})
      pass->tensor += part * pass->compute;
  }

  // Parameters that are sharded are gathered under the computation, which slows down by a part of
  // it; gradients go back to their shards.
  void share(LayerTime& time) const {
    const Layout& l = layout_;
    const bool gathers = l.shards > 1 && l.shard != ShardingStrategy::no_shard &&
                         l.shard != ShardingStrategy::optimizer;
    const double fetch =
        l.offload_params ? time.parameters * l.element / l.shards / cluster_.links.device_link : 0;
    const double drop =
        l.offload_grads ? time.parameters * l.element / l.shards / cluster_.links.device_link : 0;
    if (!gathers && fetch == 0 && drop == 0) return;
    const double gather =
        fetch + (gathers ? collective_time(cluster_, Collective::all_gather, shard_group_,
                                           time.parameters * l.element)
                         : 0);
    const double gradient =
        cluster_.software.gradient_bytes > 0 ? cluster_.software.gradient_bytes : l.element;
    const double reductions = cluster_.software.reduce_each ? 1.0 : 1.0 / l.micro_batches;
    const double scatter =
        gathers ? reductions * collective_time(cluster_, Collective::reduce_scatter, shard_group_,
                                               time.parameters * gradient)
                : 0;
    hide(time.forward, time.forward.total(), gather);
    const bool again = l.shard != ShardingStrategy::shard_grad_op || l.offload_params;
    hide(time.input, time.backward().total(), (again ? gather : 0) + scatter + drop);
  }
  // `work` is what the communication can hide under.
  void hide(PassTime& pass, double work, double communication) const {
    const double slow = cluster_.software.slowdown * communication;
    pass.gather = std::max(work + slow, communication) - work;
  }

  const ModelShape& model_;
  const Layout& layout_;
  const Cluster& cluster_;
  double tokens_;
  int tp_;
  GroupShape tp_group_, shard_group_;
};

}  // namespace

PassTime& PassTime::operator+=(const PassTime& other) {
  compute += other.compute;
  tensor += other.tensor;
  context += other.context;
  gather += other.gather;
  host += other.host;
  return *this;
}

PassTime PassTime::operator*(double times) const {
  return {compute * times, tensor * times, context * times, gather * times, host * times};
}

PassTime LayerTime::backward() const {
  PassTime sum = input;
  sum += weight;
  return sum;
}

double ModelShape::block_parameters() const {
  const auto h = static_cast<double>(hidden), f = static_cast<double>(ffn);
  const auto width = static_cast<double>(heads * head_size);
  const auto kv = static_cast<double>(kv_heads * head_size);
  return h * (2 * width + 2 * kv) + h * f * (gated ? 3 : 2);
}

double ModelShape::parameters() const {
  return static_cast<double>(layers) * block_parameters() + table_parameters() * (tied ? 1 : 2);
}

double ModelShape::flops_per_token(int64_t sequence) const {
  return 6 * (static_cast<double>(layers) * block_parameters() + table_parameters()) +
         12 * static_cast<double>(layers * heads * head_size * sequence);
}

LayerTimes layer_times(const ModelShape& model, const Layout& layout, const Cluster& cluster) {
  const LayerClock clock(model, layout, cluster);
  LayerTimes times{clock.embedding(), clock.block(), clock.head()};
  if (layout.recompute_of_blocks.empty()) return times;
  times.each.push_back(times.embedding);
  for (const Recompute recompute : layout.recompute_of_blocks)
    times.each.push_back(clock.block(recompute));
  times.each.push_back(times.head);
  return times;
}

LayerTimes layer_times(const std::vector<MeasuredLayer>& layers, const Layout& layout,
                       const Cluster& cluster) {
  const ModelShape model = measured_shape(layers, layout);
  const LayerClock clock(model, layout, cluster);
  LayerTimes times;
  for (const MeasuredLayer& layer : layers) times.each.push_back(clock.measured(layer));
  return times;
}

ModelShape measured_shape(const std::vector<MeasuredLayer>& layers, const Layout& layout) {
  double widest = 0;
  for (const MeasuredLayer& layer : layers) widest = std::max(widest, layer.output_bytes);
  const double rows = static_cast<double>(layout.local_tokens()) * layout.element;
  return {.layers = static_cast<int64_t>(layers.size()) - 2,  // and an embedding and a head
          .hidden = std::max<int64_t>(1, static_cast<int64_t>(widest / rows))};
}

}  // namespace lockstep::plan
