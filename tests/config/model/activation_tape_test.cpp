// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/activation_tape.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace lockstep::config {
namespace {

// (100) -> (100), saves its input, with parameters of 10.
Buffer layer(Tape& tape, const Buffer& x) {
  tape.record({.saved = {x}, .gradient = 100, .extra = 5, .weights = 10});
  return tape.take(100);
}

struct Chain {
  explicit Chain(int layers) {
    Buffer x = ledger.take(100);
    for (int i = 0; i < layers; ++i) x = layer(tape, x);
  }
  Ledger ledger;
  Tape tape{ledger};
};

TEST(Tape, BackwardFreesWhatForwardSaved) {
  Chain chain(3);
  EXPECT_EQ(chain.ledger.peak(), 400);
  EXPECT_EQ(chain.ledger.now(), 300) << "nobody has saved the output";
  chain.ledger.reset_peak();
  const Buffer gradient = chain.tape.backward(chain.ledger.take(100), WeightGradients::dropped);
  EXPECT_EQ(chain.ledger.peak(), 300 + 100 + 100 + 10 + 5);
  EXPECT_EQ(chain.ledger.now(), 100) << "the gradient of the input";
}

TEST(Tape, GradientsOfParametersMayStay) {
  Chain chain(3);
  chain.tape.backward(chain.ledger.take(100), WeightGradients::kept);
  EXPECT_EQ(chain.ledger.now(), 30);
}

TEST(Tape, RecomputingKeepsTheInput) {
  Ledger ledger;
  Tape tape(ledger);
  {
    const Buffer x = ledger.take(100);
    tape.recompute(x, [x](Tape& inner) { return layer(inner, layer(inner, layer(inner, x))); });
  }
  EXPECT_EQ(ledger.now(), 100);
  ledger.reset_peak();
  tape.backward(ledger.take(100), WeightGradients::dropped);
  EXPECT_EQ(ledger.peak(), 300 + 100 + 100 + 10 + 5);
  EXPECT_EQ(ledger.now(), 0);
}

TEST(Tape, AResidualHoldsItsGradient) {
  Ledger ledger;
  Tape tape(ledger);
  {
    const Buffer x = ledger.take(100);
    tape.fork();
    const Buffer change = layer(tape, layer(tape, x));
    tape.join();
  }
  EXPECT_EQ(ledger.now(), 200);
  ledger.reset_peak();
  const Buffer gradient = tape.backward(ledger.take(100), WeightGradients::dropped);
  // At the first layer: what it saved, the gradient of the sum, those of its output and input.
  EXPECT_EQ(ledger.peak(), std::max(200 + 100 + 100 + 15, 100 + 100 + 100 + 100 + 15));
  EXPECT_EQ(ledger.now(), 100);
}

TEST(Tape, TheFirstHalfOfABackwardFreesNothing) {
  Chain chain(3);
  chain.tape.record({.saved = {chain.ledger.take(50)}, .gradient = 100});  // without parameters
  Buffer gradient = chain.tape.backward_input(chain.ledger.take(100));
  gradient.reset();
  EXPECT_EQ(chain.ledger.now(), 350 + 300) << "and the gradients of three outputs";
  chain.tape.release_after_input();
  EXPECT_EQ(chain.ledger.now(), 300 + 300);
  chain.tape.backward_weight(WeightGradients::kept);
  EXPECT_EQ(chain.ledger.now(), 300 + 30);
}

TEST(Tape, AGradientMayTakeThePlaceOfWhatWasSaved) {
  Ledger ledger;
  Tape tape(ledger);
  tape.record({.saved = {ledger.take(100)}, .in_place = true});
  ledger.reset_peak();
  const Buffer gradient = tape.backward(ledger.take(0), WeightGradients::dropped);
  EXPECT_EQ(ledger.peak(), 100);
  EXPECT_EQ(ledger.now(), 100);
}

}  // namespace
}  // namespace lockstep::config
