// SPDX-License-Identifier: Apache-2.0
// Steps write parameters by pointer: others must notice all the same.
#include "lockstep/optim/elementwise_optimizer.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>

#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/optim/step_guard.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

constexpr auto kWatched = c10::DispatchKey::DeferredInit;

// Called for every tensor with the key that an operator is about to write. Dispatcher fallbacks are
// of the process, so this is too.
std::function<void(const at::Tensor&)>& on_write() {
  static std::function<void(const at::Tensor&)> callback;
  return callback;
}

void report_writes(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard pass_on(kWatched);
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    if (value.isTensor() && value.toTensor().key_set().has(kWatched) && on_write()) {
      on_write()(value.toTensor());
    }
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&report_writes>());
}

void put_key_on(const at::Tensor& parameter) {
  const at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(parameter.storage()), c10::DispatchKeySet({c10::DispatchKey::CPU, kWatched}),
      parameter.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(parameter.sizes(), parameter.strides());
  parameter.set_data(view);
}

// Every kind of optimizer, and both ways to update: kernels, and operators where there are gaps.
using Make = std::function<std::unique_ptr<Optimizer>(std::vector<NamedParameter>)>;
const std::vector<Make>& optimizers() {
  static const std::vector<Make> all = {
      [](auto parameters) { return std::make_unique<AdamW>(parameters); },
      [](auto parameters) { return std::make_unique<SGD>(parameters); },
      [](auto parameters) {
        return std::make_unique<SGD>(parameters, SGDOptions{.momentum = 0.9});
      }};
  return all;
}

std::vector<at::Tensor> many_kinds() {
  const at::Tensor gaps = at::randn({4, 6}).slice(1, 0, 6, 2).requires_grad_();
  const at::Tensor columns = at::randn({4, 3}).t().requires_grad_();
  return {parameter({5, 3}), parameter({7}, at::kBFloat16), parameter({}), columns, gaps};
}

TEST(OptimizerWrites, RaiseTheVersion) {
  for (const Make& make : optimizers()) {
    auto tensors = many_kinds();
    const auto optimizer = make(named(tensors));
    set_grads(tensors, tensors);
    tensors[2].mutable_grad() = at::Tensor();
    for (int step = 0; step < 2; ++step) {
      std::vector<int64_t> before;
      for (const at::Tensor& tensor : tensors) before.push_back(tensor._version());
      optimizer->step();
      for (size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_EQ(tensors[i]._version() > before[i], i != 2) << i;
      }
    }
  }
}

TEST(OptimizerWrites, BetweenForwardAndBackwardAreAnError) {
  for (const Make& make : optimizers()) {
    torch::nn::Sequential model(torch::nn::Linear(4, 5), torch::nn::Linear(5, 2));
    const auto optimizer = make(named_parameters(*model));
    const auto loss = [&] { return model->forward(at::ones({3, 4})).square().sum(); };
    loss().backward();
    const at::Tensor late = loss();
    optimizer->step();
    EXPECT_THROW(late.backward(), c10::Error);
    loss().backward();
  }
}

TEST(OptimizerWrites, AreSeenByADispatchKeyBeforeMemoryChanges) {
  for (const Make& make : optimizers()) {
    auto tensors = many_kinds();
    // With the same strides, so that both are updated by the same kernels or operators.
    std::vector<at::Tensor> plain;
    for (const at::Tensor& tensor : tensors) {
      plain.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
      plain.back().copy_(tensor.detach()).requires_grad_();
    }
    for (const at::Tensor& tensor : tensors) put_key_on(tensor);
    ASSERT_TRUE(tensors[0].key_set().has(kWatched));
    const auto optimizer = make(named(tensors)), reference = make(named(plain));
    for (int step = 0; step < 2; ++step) {
      set_grads(tensors, plain);
      tensors[2].mutable_grad() = plain[2].mutable_grad() = at::Tensor();
      const auto before = copies_of(tensors);
      std::vector<bool> seen(tensors.size());
      on_write() = [&](const at::Tensor& written) {
        for (size_t i = 0; i < tensors.size(); ++i) {
          if (!written.is_alias_of(tensors[i]) || seen[i]) continue;
          seen[i] = true;
          EXPECT_TRUE(at::equal(tensors[i], before[i])) << i;
        }
      };
      optimizer->step();
      on_write() = nullptr;
      EXPECT_EQ(seen, (std::vector{true, true, false, true, true}));
      reference->step();
      for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(at::equal(tensors[i], plain[i])) << i;
    }
  }
}

TEST(OptimizerWrites, GoToMemoryThatADispatchKeyReplaced) {
  const at::Tensor tensor = parameter({6}), plain = copy_of(tensor);
  put_key_on(tensor);
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  on_write() = [&](const at::Tensor&) {  // elsewhere than before
    c10::DataPtr fresh = c10::GetAllocator(at::kCPU)->allocate(storage->nbytes());
    std::memcpy(fresh.get(), plain.data_ptr(), storage->nbytes());
    storage->set_data_ptr(std::move(fresh));
    on_write() = nullptr;
  };
  AdamW optimizer({{"p", tensor}}), reference({{"p", plain}});
  for (const at::Tensor& parameter : {tensor, plain}) parameter.mutable_grad() = at::ones({6});
  optimizer.step();
  EXPECT_FALSE(on_write());
  reference.step();
  EXPECT_TRUE(at::equal(tensor, plain));
}

TEST(NoParameters, EverythingIsANoOp) {
  for (const Make& make : optimizers()) {
    const auto optimizer = make({});
    optimizer->zero_grad();
    optimizer->step();
    EXPECT_TRUE(optimizer->state().empty());
    optimizer->load_state({});
    optimizer->set_lr(0.5);
    EXPECT_TRUE(optimizer->parameters().empty());
    EXPECT_EQ(clip_grad_norm_(optimizer->parameters(), 1), 0);
    StepGuard guard;
    EXPECT_TRUE(guard.step(*optimizer));
  }
  AdamW no_groups(std::vector<ParameterGroup>{});
  no_groups.step();
  EXPECT_TRUE(no_groups.state().empty());
}

}  // namespace
}  // namespace lockstep::optim
