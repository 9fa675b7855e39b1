// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/profile.h"

#include <utility>

namespace lockstep::plan {
namespace {

// A layer whose forward has run.
struct ForwardedLayer {
  ForwardedLayer(LayerKind kind, const Sizes& sizes) : tape(ledger), sizes(sizes), kind(kind) {
    const Buffer input = ledger.take(kind == LayerKind::embedding ? 0 : sizes.stream());
    const Buffer output = kind == LayerKind::embedding ? embedding(tape, sizes)
                          : kind == LayerKind::block   ? block(tape, sizes, input)
                                                       : head(tape, sizes, input);
    forward_peak = ledger.peak();
  }
  // Of its output.
  Buffer gradient() { return ledger.take(kind == LayerKind::head ? 0 : sizes.stream()); }

  Ledger ledger;
  Tape tape;
  const Sizes& sizes;
  LayerKind kind;
  int64_t forward_peak = 0;
};

struct Peak {
  int64_t peak = 0, left = 0;
};

Peak backward(LayerKind kind, const Sizes& sizes, Weights weights) {
  ForwardedLayer layer(kind, sizes);
  layer.ledger.reset_peak();
  Buffer gradient = layer.tape.backward(layer.gradient(), weights);
  const int64_t peak = layer.ledger.peak();
  gradient.reset();
  return {peak, layer.ledger.now()};
}

Peak weight_half(LayerKind kind, const Sizes& sizes, Weights weights) {
  ForwardedLayer layer(kind, sizes);
  layer.tape.backward_input(layer.gradient());
  layer.tape.release_after_input();
  layer.ledger.reset_peak();
  const int64_t left = layer.ledger.now();
  layer.tape.backward_weight(weights);
  return {layer.ledger.peak(), left};
}

}  // namespace

Profile profile_of(LayerKind kind, const Sizes& sizes) {
  Profile profile;
  {
    ForwardedLayer layer(kind, sizes);
    profile.forward_peak = layer.forward_peak;
    profile.kept = layer.ledger.now();
    layer.ledger.reset_peak();
    Buffer gradient = layer.tape.backward_input(layer.gradient());
    profile.input_peak = layer.ledger.peak();
    gradient.reset();
    profile.input_held = layer.ledger.now();
  }
  profile.backward_peak = backward(kind, sizes, Weights::dropped).peak;
  const Peak keeping = backward(kind, sizes, Weights::kept);
  profile.backward_peak_keeping = keeping.peak;
  profile.weights = keeping.left;
  const Peak half = weight_half(kind, sizes, Weights::dropped);
  profile.weight_kept = half.left;
  profile.weight_peak = half.peak;
  profile.weight_peak_keeping = weight_half(kind, sizes, Weights::kept).peak;
  return profile;
}

}  // namespace lockstep::plan
