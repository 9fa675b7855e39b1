// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace lockstep::parallel::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::Node;

// Which nodes of a graph lie between its roots and its inputs.
class Paths {
 public:
  Paths(const SplitBackward::Edges& roots, const SplitBackward::Edges& inputs) {
    for (const Edge& input : inputs) inputs_.insert(input.function.get());
    for (const Edge& root : roots) visit(root.function.get());
  }

  // Inputs too.
  bool leads_to_input(Node* node) const { return leads_.at(node); }
  // But with a way to parameters that passes by all inputs, too.
  bool branches(Node* node) const {
    if (!leads_to_input(node)) return false;
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid() && !leads_to_input(edge.function.get())) return true;
    }
    return false;
  }
  const std::vector<Node*>& nodes() const { return nodes_; }

 private:
  // Depth first, children before parents, without recursion: graphs are deep.
  void visit(Node* root) {
    struct Visit {
      Node* node;
      size_t next = 0;
    };
    std::vector<Visit> stack{{root}};
    while (!stack.empty()) {
      Visit& top = stack.back();
      Node* const node = top.node;
      if (leads_.contains(node) && top.next == 0) {
        stack.pop_back();
        continue;
      }
      const auto& edges = node->next_edges();
      while (top.next < edges.size() &&
             (!edges[top.next].is_valid() || leads_.contains(edges[top.next].function.get())))
        ++top.next;
      if (top.next < edges.size()) {
        stack.push_back({edges[top.next++].function.get()});
        continue;
      }
      bool leads = inputs_.contains(node);
      for (const Edge& edge : edges)
        leads = leads || (edge.is_valid() && leads_.at(edge.function.get()));
      leads_[node] = leads;
      nodes_.push_back(node);
      stack.pop_back();
    }
  }

  std::unordered_set<Node*> inputs_;
  std::unordered_map<Node*, bool> leads_;
  std::vector<Node*> nodes_;
};

}  // namespace

SplitBackward::SplitBackward(Edges roots, Gradients gradients, const Edges& inputs)
    : inputs_(inputs) {
  const Paths paths(roots, inputs);
  Edges first_roots;
  Gradients first_gradients;
  for (size_t i = 0; i < roots.size(); ++i) {
    const bool first = paths.leads_to_input(roots[i].function.get());
    (first ? first_roots : begins_).push_back(roots[i]);
    (first ? first_gradients : kept_).push_back(gradients[i]);
  }
  Edges wanted = inputs;
  std::vector<std::shared_ptr<Node>> branching;
  for (Node* node : paths.nodes()) {
    if (!paths.branches(node)) continue;
    branching.push_back(node->shared_from_this());
    for (uint32_t i = 0; i < node->num_inputs(); ++i) wanted.emplace_back(branching.back(), i);
  }
  Gradients found(wanted.size());
  if (!first_roots.empty()) {
    found = Engine::get_default_engine().execute(first_roots, first_gradients,
                                                 /*keep_graph=*/true, /*create_graph=*/false,
                                                 /*accumulate_grad=*/false, wanted);
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (i < inputs.size()) {
      input_gradients_.push_back(std::move(found[i]));
    } else if (found[i].defined()) {
      begins_.push_back(wanted[i]);
      kept_.push_back(std::move(found[i]));
    }
  }
  // The way to the inputs is behind us. What was saved on it goes now: the nodes may live on, as
  // what made a tensor that a branching node saved.
  for (Node* node : paths.nodes()) {
    if (paths.leads_to_input(node) && !paths.branches(node)) node->release_variables();
  }
  // The second half cannot take it again.
  for (const std::shared_ptr<Node>& node : branching) {
    for (Edge& edge : node->next_edges()) {
      if (edge.is_valid() && paths.leads_to_input(edge.function.get())) edge = Edge();
    }
  }
}

size_t SplitBackward::kept_bytes() const {
  size_t bytes = 0;
  for (const at::Tensor& gradient : kept_) bytes += gradient.nbytes();
  return bytes;
}

bool SplitBackward::run_weights() {
  const Edges begins = std::exchange(begins_, {});
  const Gradients kept = std::exchange(kept_, {});
  const Edges inputs = std::exchange(inputs_, {});
  if (begins.empty()) return false;
  Engine::get_default_engine().execute(begins, kept, /*keep_graph=*/false, /*create_graph=*/false,
                                       /*accumulate_grad=*/true, {});
  return true;
}

}  // namespace lockstep::parallel::detail
