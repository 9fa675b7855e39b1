// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/layer_cost.h"

#include <utility>

namespace lockstep::config {
namespace {

// A layer whose forward has run.
struct ForwardedLayer {
  ForwardedLayer(LayerType type, const LayerSizes& sizes) : tape(ledger), sizes(sizes), type(type) {
    if (sizes.stores_all()) tape.store_saved();
    const Buffer input = ledger.take(type == LayerType::embedding ? 0 : sizes.stream());
    const Buffer output = type == LayerType::embedding ? embedding(tape, sizes)
                          : type == LayerType::block   ? block(tape, sizes, input)
                                                       : head(tape, sizes, input);
    forward_peak = ledger.peak();
  }
  // Of its output.
  Buffer gradient() { return ledger.take(type == LayerType::head ? 0 : sizes.stream()); }

  Ledger ledger;
  Tape tape;
  const LayerSizes& sizes;
  LayerType type;
  int64_t forward_peak = 0;
};

struct Peak {
  int64_t peak = 0, left = 0;
};

Peak backward(LayerType type, const LayerSizes& sizes, WeightGradients weights) {
  ForwardedLayer layer(type, sizes);
  layer.ledger.reset_peak();
  Buffer gradient = layer.tape.backward(layer.gradient(), weights);
  const int64_t peak = layer.ledger.peak();
  gradient.reset();
  return {peak, layer.ledger.now()};
}

Peak weight_half(LayerType type, const LayerSizes& sizes, WeightGradients weights) {
  ForwardedLayer layer(type, sizes);
  layer.tape.backward_input(layer.gradient());
  layer.tape.release_after_input();
  layer.ledger.reset_peak();
  const int64_t left = layer.ledger.now();
  layer.tape.backward_weight(weights);
  return {layer.ledger.peak(), left};
}

}  // namespace

plan::LayerCost layer_cost(LayerType type, const LayerSizes& sizes) {
  plan::LayerCost cost;
  {
    ForwardedLayer layer(type, sizes);
    cost.forward_peak = layer.forward_peak;
    cost.kept = layer.ledger.now();
    cost.stored = sizes.on_disk ? sizes.stream() : 0;
    layer.ledger.reset_peak();
    Buffer gradient = layer.tape.backward_input(layer.gradient());
    cost.input_peak = layer.ledger.peak();
    gradient.reset();
    cost.input_held = layer.ledger.now();
  }
  cost.backward_peak = backward(type, sizes, WeightGradients::dropped).peak;
  const Peak keeping = backward(type, sizes, WeightGradients::kept);
  cost.backward_peak_keeping = keeping.peak;
  cost.weights = keeping.left;
  const Peak half = weight_half(type, sizes, WeightGradients::dropped);
  cost.weight_kept = half.left;
  cost.weight_peak = half.peak;
  cost.weight_peak_keeping = weight_half(type, sizes, WeightGradients::kept).peak;
  return cost;
}

}  // namespace lockstep::config
