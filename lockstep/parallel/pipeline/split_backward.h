// SPDX-License-Identifier: Apache-2.0
// The backward of any graph in two halves: first the gradients of its inputs, later those of the
// parameters. Private: not installed.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <vector>

namespace lockstep::parallel::detail {

// The first half goes from the roots to the inputs and passes by every node that also leads to
// parameters (a matmul with a weight); what arrives at such a node is kept. The second half begins
// at these nodes with what was kept, as one backward. Nothing is computed twice, and in between
// only these nodes have what they saved.
class SplitBackward {
 public:
  using Edges = std::vector<torch::autograd::Edge>;
  using Gradients = torch::autograd::variable_list;

  // The graph behind the roots, whose gradients these are, up to the inputs. Inputs are leaves, or
  // tensors inside the graph: what is below them, and is no way to another, belongs to the second
  // half. Consumes the graph: no other backward may go through it.
  SplitBackward(Edges roots, Gradients gradients, const Edges& inputs);

  // Of the inputs; undefined where none arrived.
  const Gradients& input_gradients() const { return input_gradients_; }
  Gradients take_input_gradients() { return std::move(input_gradients_); }
  // What is kept for the second half, apart from what nodes saved in forward.
  size_t kept_bytes() const;

  // The second half: adds to the parameters' gradients, as a backward does. False where there is
  // none.
  bool run_weights();

 private:
  Gradients input_gradients_;
  // An input that was saved can be unpacked (by recompute's hooks) while its accumulator lives.
  Edges inputs_;
  Edges begins_;
  Gradients kept_;
};

}  // namespace lockstep::parallel::detail
