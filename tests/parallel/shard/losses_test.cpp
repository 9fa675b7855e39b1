// SPDX-License-Identifier: Apache-2.0
// Losses made in uncommon ways: a sharded model computes what the plain one does.
#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/optim/autocast.h"
#include "lockstep/parallel/recompute/recompute.h"
#include "tests/parallel/shard/pair.h"

namespace lockstep::test {
namespace {

using at::Tensor;
using torch::indexing::None;

// Keeps a weight for its own backward.
struct Scaled : torch::autograd::Function<Scaled> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1]), gradients[0].t().matmul(saved[0])};
  }
};

struct Use {
  std::string name;
  std::function<Tensor(Net&, const Tensor&)> loss;
};

std::vector<Tensor> weights_of(const Net& net) {
  return {net.a->weight, net.b->weight, net.norm->weight};
}

std::vector<Use> uses() {
  return {
      {"plain", [](Net& net, const Tensor& x) { return loss_of(net.forward(x)); }},
      {"twice",
       [](Net& net, const Tensor& x) {
         return loss_of(net.a(at::tanh(net.b(net.a(x) + net.a(x.neg())))));
       }},
      {"mm_of_two_units",
       [](Net& net, const Tensor& x) {
         return loss_of(x.mm(at::mm(net.b->weight, net.a->weight)));
       }},
      {"cat",
       [](Net& net, const Tensor& x) {
         return loss_of(x.mm(at::cat({net.a->weight, net.table->weight, net.b->weight.t()}).t()));
       }},
      {"stack",
       [](Net& net, const Tensor& x) {
         return loss_of(x.matmul(at::stack({net.a->weight, net.b->weight.t()}).transpose(1, 2)));
       }},
      {"foreach",
       [](Net& net, const Tensor& x) {
         // torch 1.13 has no derivative of it.
         std::vector<Tensor> sums = at::_foreach_add(weights_of(net), 1.5);
         for (Tensor& sum : sums) sum = sum.detach();
         return loss_of(x.mm(sums[0].t()).mm(sums[1].t()) * sums[2] * net.scale);
       }},
      {"to_vector",
       [](Net& net, const Tensor& x) {
         return loss_of(torch::nn::utils::parameters_to_vector(net.parameters())) + x.sum();
       }},
      {"index",
       [](Net& net, const Tensor& x) {
         const Tensor rows = at::tensor({3, 0, 3}, at::kLong),
                      columns = at::tensor({1, 5, 1}, at::kLong);
         const Tensor& weight = net.a->weight;
         return loss_of(weight.index({rows})) + loss_of(weight.index({rows, columns})) +
                loss_of(weight.index({None, columns})) + loss_of(x.index({None, net.order}));
       }},
      {"views",
       [](Net& net, const Tensor& x) {
         const Tensor& weight = net.a->weight;
         Tensor sum = loss_of(weight.narrow(1, 2, 3)) + loss_of(weight.t().reshape({-1}));
         for (const Tensor& row : weight.unbind()) sum = sum + loss_of(x.matmul(row));
         for (const Tensor& part : net.b->weight.view({4, 12}).chunk(2))
           sum = sum + part.select(0, 1).expand({3, 12}).square().sum();
         return sum;
       }},
      {"old_view",  // made while the unit was here, read when it is not
       [](Net& net, const Tensor& x) {
         const Tensor view = net.a->weight.t();
         const Tensor between = net.b(x.mm(view));
         return loss_of(between.mm(view));
       }},
      {"grad",
       [](Net& net, const Tensor& x) {
         const auto gradients = torch::autograd::grad({loss_of(net.forward(x))}, weights_of(net));
         Tensor sum = loss_of(net.forward(x));
         for (const Tensor& gradient : gradients) sum = sum + loss_of(gradient);
         return sum;
       }},
      {"double_backward",
       [](Net& net, const Tensor& x) {
         const Tensor loss = loss_of(at::tanh(net.b(at::tanh(net.a(x)))));
         const auto gradients =
             torch::autograd::grad({loss}, {net.a->weight, net.b->weight}, {}, true, true);
         return loss + gradients[0].square().sum() + gradients[1].square().sum();
       }},
      {"backward_of_some",
       [](Net& net, const Tensor& x) {
         const std::vector<Tensor> some{net.b->weight, net.scale};
         loss_of(net.forward(x)).backward({}, /*keep_graph=*/false, /*create_graph=*/false, some);
         return loss_of(net.forward(x.neg()));
       }},
      {"two_backwards",
       [](Net& net, const Tensor& x) {
         loss_of(net.forward(x)).backward();
         return loss_of(net.b(net.a(x)));
       }},
      {"several_forwards",
       [](Net& net, const Tensor& x) {
         const Tensor first = net.forward(x), second = net.forward(x * 2);
         return loss_of(second) + loss_of(net.forward(first));
       }},
      {"no_grad_between",
       [](Net& net, const Tensor& x) {
         const Tensor hidden = net.a(x);
         const Tensor seen = [&] {
           const at::NoGradGuard no_grad;
           return net.forward(x).sum();
         }();
         return loss_of(net.b(hidden)) * seen;
       }},
      {"recompute",
       [](Net& net, const Tensor& x) {
         torch::nn::Linear a = net.a, b = net.b;
         const Tensor hidden = parallel::recompute([a, x]() mutable { return at::gelu(a(x)); });
         const Tensor out =
             parallel::recompute([b, hidden]() mutable { return at::tanh(b(hidden)); });
         return loss_of(net.norm(out)) + loss_of(net.a(out));
       }},
      {"autocast",
       [](Net& net, const Tensor& x) {
         const Tensor out = [&] {
           const optim::AutocastGuard casts({.device = at::kCPU, .dtype = at::kBFloat16});
           return at::mm(at::mm(x, net.a->weight.t()), net.b->weight.t());
         }();
         require(out.scalar_type() == at::kBFloat16, "nothing was cast");
         return loss_of(net.norm(out.to(at::kFloat)) * net.scale);
       }},
      {"function",
       [](Net& net, const Tensor& x) { return loss_of(net.b(Scaled::apply(x, net.a->weight))); }},
      {"in_place_on_results",
       [](Net& net, const Tensor& x) {
         Tensor out = net.a(x);
         out.add_(net.a->bias).mul_(at::sigmoid(net.a->bias));
         return loss_of(at::addmm(net.b->bias, out, net.b->weight.t()));
       }},
      {"only_a_weight", [](Net& net, const Tensor& x) { return net.a->weight.norm() + x.sum(); }},
  };
}

class Uses : public testing::TestWithParam<Use> {};

TEST_P(Uses, ShardedAndPlainModelsGiveTheSameBits) {
  parallel::FullyShardOptions orig = shard_all(parallel::OneUnit{}), ahead = shard_all(),
                              two = ahead;
  orig.use_orig_params = true;
  ahead.advanced.prefetch_depth = 3;
  two.units = parallel::ByPredicate{
      [](const std::string& path, torch::nn::Module&) { return path == "b" || path == "norm"; }};
  for (const Sharding& sharding :
       {Sharding{"drop", shard_all(), true, 2}, Sharding{"drop_orig", orig, true, 2},
        Sharding{"drop_two", two, true, 2}, Sharding{"learned", shard_all()},
        Sharding{"ahead", ahead}, Sharding{"two", two}}) {
    SCOPED_TRACE(sharding.name);
    EXPECT_NO_THROW(on_ranks([&](const comm::Group& group) {
      Pair pair(group, sharding);
      for (int step = 0; step < sharding.steps; ++step)
        pair.step([&](Net& net) { return GetParam().loss(net, input_of(step)); });
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Losses, Uses, testing::ValuesIn(uses()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep::test
