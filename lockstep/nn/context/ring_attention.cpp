// SPDX-License-Identifier: Apache-2.0
// In step i a rank has the keys and values of rank r - i, and sends them to rank r + 1 while it
// computes. In backward their gradients follow one step behind: a rank adds its contribution to
// what has arrived from rank r - 1, and the last step sends them home.
#include "lockstep/nn/context/ring_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <optional>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/autograd/product.h"
#include "lockstep/nn/context/tile_attention.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A tensor on its way to the next rank, and that of the rank before on its way here.
class Hop {
 public:
  Hop(const at::Tensor& sent, const at::Tensor& received, const comm::Group& group,
      const char* tag) {
    const int ranks = group.size(), rank = group.rank();
    if (ranks == 1) {
      received.copy_(sent);
      return;
    }
    send_ = comm::send(sent, (rank + 1) % ranks, group, {.tag = tag});
    receive_ = comm::recv(received, (rank + ranks - 1) % ranks, group, {.tag = tag});
  }
  void wait() {
    receive_.wait();
    send_.wait();
  }

 private:
  comm::Work send_, receive_;
};

// Calls body(step, the keys and values of the step's rank), and meanwhile gets the next ones.
template <class Body>
void go_round(const Ring& ring, const at::Tensor& k, const at::Tensor& v, Body body) {
  const int ranks = ring.group.size();
  at::Tensor here = at::stack({k, v}), next = at::empty_like(here);
  for (int step = 0; step < ranks; ++step) {
    std::optional<Hop> hop;
    if (step + 1 < ranks) hop.emplace(here, next, ring.group, "keys and values");
    body(step, here[0], here[1]);
    if (hop) hop->wait();
    std::swap(here, next);
  }
}

PartialAttention all_of(const Ring& ring, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v) {
  const auto wide = q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor out = at::zeros(q.sizes(), wide),
                   lse = at::full(q.sizes().slice(0, 3), -std::numeric_limits<double>::infinity(),
                                  wide);
  go_round(ring, k, v, [&](int step, const at::Tensor& keys, const at::Tensor& values) {
    for (const AttentionTile& tile : ring.steps[static_cast<size_t>(step)])
      merge(out, lse, attend(q, keys, values, tile), tile);
  });
  return {out.to(q.scalar_type()), lse};
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::shared_ptr<const Ring>& ring) {
    PartialAttention all;
    const at::Tensor out = kept_product([&] {
      all = all_of(*ring, q, k, v);
      return all.out;
    });
    const at::Tensor lse = kept_product([&] { return all.lse; });
    context->save_for_backward({q, k, v, out, lse});
    save_value(*context, "ring", ring);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("ring_attention");
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &lse = saved[4];
    const auto ring = saved_value<std::shared_ptr<const Ring>>(*context, "ring");
    const AttentionResult result{
        .out = saved[3],
        .lse = lse,
        .grad = gradients[0],
        .delta = (gradients[0].to(lse.scalar_type()) * saved[3].to(lse.scalar_type())).sum(-1)};
    const at::Tensor grad_q = at::zeros(q.sizes(), lse.options());
    auto kv_sizes = k.sizes().vec();
    kv_sizes.insert(kv_sizes.begin(), 2);
    at::Tensor arriving = at::empty(kv_sizes, lse.options());
    std::optional<Hop> behind;
    go_round(*ring, k, v, [&](int step, const at::Tensor& keys, const at::Tensor& values) {
      const at::Tensor here = at::zeros(kv_sizes, lse.options());
      for (const AttentionTile& tile : ring->steps[static_cast<size_t>(step)])
        add_gradients({grad_q, here[0], here[1]}, q, keys, values, result, tile);
      if (behind) {
        behind->wait();
        here.add_(arriving);
      }
      behind.emplace(here, arriving, ring->group, "gradients of keys and values");
    });
    behind->wait();
    return {grad_q.to(q.scalar_type()), arriving[0].to(k.scalar_type()),
            arriving[1].to(v.scalar_type()), at::Tensor()};
  }
};

}  // namespace

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const Ring>& ring) {
  return RingAttention::apply(q, k, v, ring);
}

}  // namespace lockstep::nn
