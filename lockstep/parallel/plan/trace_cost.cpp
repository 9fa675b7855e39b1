// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/plan/trace_cost.h"

#include <algorithm>
#include <set>
#include <unordered_map>

namespace lockstep::parallel::detail {
namespace {

// Goes through a trace and adds up what is in use.
class InUse {
 public:
  InUse(const Trace& trace, const InputPlaces& inputs) : trace_(trace) {
    for (size_t i = 0; i < trace.inputs.size(); ++i) {
      if (!trace.inputs[i]) continue;
      const bool before = i < inputs.counted_before.size() && inputs.counted_before[i];
      if (before) {
        ignored_.insert(*trace.inputs[i]);
      } else {
        own_inputs_.insert(*trace.inputs[i]);
        if (inputs.held && inputs.on_disk == OnDisk::nothing) held_.insert(*trace.inputs[i]);
      }
    }
  }

  // Up to this event. The peak is reset first.
  void run(size_t end) {
    peak_ = now_;
    for (; next_ < end; ++next_) {
      const auto& [block, bytes] = trace_.events[next_];
      if (bytes > 0) {
        if (!ignored_.contains(block)) take(block, bytes);
      } else if (!held_.contains(block)) {
        drop(block);
      }
    }
  }
  // What is in use goes to the disk. Returns the bytes of the largest input that does.
  int64_t store(OnDisk what) {
    int64_t largest = 0;
    const auto in_use = bytes_in_use_;
    for (const auto& [block, bytes] : in_use) {
      if (what == OnDisk::nothing || (what == OnDisk::inputs && !own_inputs_.contains(block)))
        continue;
      drop(block);
      stored_[block] = bytes;
      if (own_inputs_.contains(block)) largest = std::max(largest, bytes);
    }
    return largest;
  }
  // Recomputation begins with all of its inputs. What autograd saved comes one by one: what is
  // dropped was there for a moment.
  void load(OnDisk what) {
    if (what != OnDisk::inputs) return;
    for (const auto& [block, bytes] : stored_) take(block, bytes);
    stored_.clear();
  }
  void release_held() {
    held_.clear();
    for (const size_t block : own_inputs_) drop(block);
  }

  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }
  bool uses(size_t block) const { return bytes_in_use_.contains(block) || stored_.contains(block); }
  // Of what is in use, what was allocated after this many events.
  int64_t allocated_since(size_t event) const {
    int64_t sum = 0;
    for (size_t i = event; i < next_; ++i) {
      const auto& [block, bytes] = trace_.events[i];
      if (bytes > 0 && bytes_in_use_.contains(block)) sum += bytes;
    }
    return sum;
  }

 private:
  void take(size_t block, int64_t bytes) {
    bytes_in_use_[block] = bytes;
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  void drop(size_t block) {
    if (const auto stored = stored_.find(block); stored != stored_.end()) {
      peak_ = std::max(peak_, now_ + stored->second);
      stored_.erase(stored);
    }
    const auto found = bytes_in_use_.find(block);
    if (found == bytes_in_use_.end()) return;
    now_ -= found->second;
    bytes_in_use_.erase(found);
  }

  const Trace& trace_;
  std::set<size_t> ignored_, held_, own_inputs_;
  std::unordered_map<size_t, int64_t> bytes_in_use_, stored_;
  size_t next_ = 0;
  int64_t now_ = 0, peak_ = 0;
};

struct BackwardCost {
  int64_t peak = 0, left = 0;
};

// Forward, and all of backward.
BackwardCost backward_cost(const Trace& trace, const InputPlaces& inputs) {
  InUse in_use(trace, inputs);
  in_use.run(trace.forward_end);
  in_use.store(inputs.on_disk);
  in_use.load(inputs.on_disk);
  in_use.run(trace.events.size());
  const int64_t peak = in_use.peak();
  in_use.release_held();
  return {peak, in_use.now()};
}

void add_halves(plan::LayerCost& cost, const LayerTraces& traces, const InputPlaces& inputs) {
  const auto second_half = [&](const Trace& trace, bool is_first) {
    InUse in_use(trace, inputs);
    in_use.run(trace.forward_end);
    const int64_t kept = in_use.now();
    in_use.run(trace.half_end);
    if (is_first) {
      cost.input_peak = in_use.peak();
      cost.input_held = kept + in_use.allocated_since(trace.forward_end);
    }
    in_use.release_held();
    if (is_first) cost.weight_kept = in_use.now();
    in_use.run(trace.events.size());
    return in_use.peak();
  };
  cost.weight_peak = second_half(traces.split_adding, true);
  cost.weight_peak_keeping = second_half(traces.split_keeping, false);
}

}  // namespace

std::optional<Trace> scaled(const Trace& of_a, const Trace& of_b, int64_t a, int64_t b,
                            int64_t rows) {
  if (of_a.events.size() != of_b.events.size() || of_a.forward_end != of_b.forward_end ||
      of_a.half_end != of_b.half_end || of_a.inputs != of_b.inputs || of_a.outputs != of_b.outputs)
    return std::nullopt;
  Trace result = of_a;
  for (size_t i = 0; i < result.events.size(); ++i) {
    memory::AllocationEvent& event = result.events[i];
    const memory::AllocationEvent& other = of_b.events[i];
    if (event.block != other.block || (event.bytes == 0) != (other.bytes == 0)) return std::nullopt;
    if (event.bytes == 0) continue;
    event.bytes =
        std::max<int64_t>(1, event.bytes + (other.bytes - event.bytes) * (rows - a) / (b - a));
  }
  return result;
}

plan::LayerCost cost_of(const LayerTraces& traces, const InputPlaces& inputs) {
  plan::LayerCost cost;
  InUse forward(traces.adding, inputs);
  forward.run(traces.adding.forward_end);
  cost.forward_peak = forward.peak();
  cost.stored = forward.store(inputs.on_disk);
  cost.kept = forward.now();
  cost.backward_peak = backward_cost(traces.adding, inputs).peak;
  const BackwardCost keeping = backward_cost(traces.keeping, inputs);
  cost.backward_peak_keeping = keeping.peak;
  cost.weights = keeping.left;
  if (!traces.split_adding.events.empty()) add_halves(cost, traces, inputs);
  return cost;
}

std::vector<bool> kept_outputs(const Trace& trace, const InputPlaces& inputs) {
  InUse in_use(trace, inputs);
  in_use.run(trace.forward_end);
  std::vector<bool> kept;
  for (const auto& block : trace.outputs) {
    bool is = block && in_use.uses(*block);
    // An output that is a view of an input is kept where that is.
    for (size_t i = 0; block && i < trace.inputs.size(); ++i) {
      if (trace.inputs[i] != block) continue;
      is = is || (i < inputs.counted_before.size() && inputs.counted_before[i]);
      is = is && inputs.on_disk == OnDisk::nothing;
    }
    is = is && inputs.on_disk != OnDisk::all;
    kept.push_back(is);
  }
  return kept;
}

}  // namespace lockstep::parallel::detail
