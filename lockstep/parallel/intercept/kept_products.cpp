// SPDX-License-Identifier: Apache-2.0
// A fallback for a dispatch key below autograd, switched on for a scope. Autograd makes its nodes
// and saves what it always saves; only the computation is replaced by its result. PyTorch's
// selective activation checkpointing does the same with a mode of Python's dispatcher.
#include "lockstep/parallel/intercept/kept_products.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/intercept/dispatch.h"
#include "lockstep/parallel/intercept/operator_facts.h"

namespace lockstep::parallel::detail {
namespace {

// Operators whose results are kept. Those that these are made of are inside them.
constexpr std::array<std::string_view, 17> kProducts = {
    "aten::mm",
    "aten::addmm",
    "aten::_addmm_activation",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::convolution",
    "aten::_convolution",
    "aten::mkldnn_convolution",
    "aten::cudnn_convolution",
    "aten::_scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
};

thread_local KeptProducts* current_products = nullptr;

// One that drops elements draws random numbers, which the second call must draw again.
bool draws(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "dropout_p") continue;
    return torch::jit::peek(stack, i, arguments.size()).toDouble() > 0;
  }
  return false;
}

bool is_product(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string_view name = op.schema().name();
  for (const std::string_view product : kProducts) {
    if (name == product) return !op.schema().is_mutable() && !draws(op, stack);
  }
  return false;
}

// Changes the values of its first argument and nothing else, and returns it.
bool only_changes_values(const c10::OperatorHandle& op) {
  const std::string_view name = op.schema().name();
  return name == "aten::add_" || name == "aten::mul_" || name == "aten::div_" ||
         name == "aten::relu_";
}

bool has_memory(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage();
}

// Another tensor with the same memory, that autograd knows nothing of.
c10::IValue alias_of(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  return value.toTensor().variable_data();
}

[[noreturn]] void refuse_other_call(const std::string& was, const std::string& is) {
  throw Error(
      format("[recompute] the function computed {} when it was called first, and {} when it was "
             "called again; it must compute the same again",
             was, is));
}

}  // namespace

void on_operator_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                                torch::jit::Stack* stack) {
  if (current_products == nullptr) return op.redispatchBoxed(below, stack);
  current_products->call(op, below, stack);
}

KeptProducts::Scope::Scope(KeptProducts* products)
    : before_(current_products),
      keeper_before_(nn::product_keeper()),
      include_(products == nullptr ? c10::DispatchKeySet()
                                   : (install_fallback_below_autograd("recompute"),
                                      c10::DispatchKeySet(kKeyBelowAutograd))) {
  current_products = products;
  nn::product_keeper() = products;
}

KeptProducts::Scope::~Scope() {
  current_products = before_;
  nn::product_keeper() = keeper_before_;
}

void KeptProducts::end_first_call() {
  entries_.resize(needed_);
  for (Entry& entry : entries_) {
    for (Version& version : entry.versions) version.saved = version.counter.current_version();
  }
}

void KeptProducts::begin_second_call() {
  for (const Entry& entry : entries_) {
    for (const Version& version : entry.versions) {
      if (version.counter.current_version() == version.saved) continue;
      throw Error(
          format("[recompute] a result of {} that backward needs was changed in place since the "
                 "function was called; run backward first",
                 entry.name));
    }
  }
  second_call_ = true;
  next_ = 0;
  fresh_ = kNone;
  memory_.clear();
}

void KeptProducts::call(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                        torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  if (is_product(op, *stack)) {
    const std::string name = name_of(op);
    if (second_call_) {
      auto results = take(name);
      torch::jit::drop(*stack, arguments);
      for (c10::IValue& result : results) stack->push_back(std::move(result));
      return;
    }
    {
      const c10::impl::ExcludeDispatchKeyGuard inside(kKeyBelowAutograd);
      op.redispatchBoxed(below, stack);
    }
    const auto results = torch::jit::last(*stack, op.schema().returns().size());
    return keep(name, results.vec());
  }
  if (op.schema().is_mutable()) {
    if (before_write(op, *stack)) {
      const c10::IValue self = torch::jit::peek(*stack, 0, arguments);
      torch::jit::drop(*stack, arguments);
      stack->push_back(self);
      return;
    }
    return op.redispatchBoxed(below, stack);
  }
  op.redispatchBoxed(below, stack);
  after_other(op, *stack);
}

at::Tensor KeptProducts::product(const std::function<at::Tensor()>& compute) {
  const std::string name = "a product";
  if (second_call_) return take(name)[0].toTensor();
  const c10::impl::ExcludeDispatchKeyGuard inside(kKeyBelowAutograd);
  const at::Tensor result = compute();
  keep(name, {result});
  return result;
}

void KeptProducts::keep(std::string name, std::vector<c10::IValue> results) {
  Entry entry{.name = std::move(name), .results = {}, .absorbed = 0, .versions = {}};
  for (const c10::IValue& result : results) {
    entry.results.push_back(alias_of(result));
    if (has_memory(result)) {
      entry.versions.push_back({torch::autograd::impl::version_counter(result.toTensor())});
    }
  }
  entries_.push_back(std::move(entry));
  fresh_ = entries_.size() - 1;
  share_memory(fresh_);
}

std::vector<c10::IValue> KeptProducts::take(const std::string& name) {
  if (next_ == entries_.size()) refuse_other_call("no more products", name);
  const Entry& entry = entries_[next_];
  if (entry.name != name) refuse_other_call(entry.name, name);
  fresh_ = next_++;
  absorbed_ = 0;
  share_memory(fresh_);
  std::vector<c10::IValue> results;
  for (const c10::IValue& result : entry.results) results.push_back(alias_of(result));
  return results;
}

void KeptProducts::share_memory(size_t entry) {
  for (const c10::IValue& result : entries_[entry].results) {
    if (has_memory(result)) memory_[result.toTensor().storage().unsafeGetStorageImpl()] = entry;
  }
}

size_t KeptProducts::entry_of(const c10::IValue& value) const {
  if (!has_memory(value)) return kNone;
  const auto found = memory_.find(value.toTensor().storage().unsafeGetStorageImpl());
  return found == memory_.end() ? kNone : found->second;
}

bool KeptProducts::before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t count = op.schema().arguments().size();
  const size_t fresh = fresh_;
  if (fresh != kNone && only_changes_values(op) &&
      entry_of(torch::jit::peek(stack, 0, count)) == fresh) {
    Entry& entry = entries_[fresh];
    if (!second_call_) {
      ++entry.absorbed;
      return false;
    }
    if (absorbed_ < entry.absorbed) {
      ++absorbed_;
      return true;
    }
  }
  fresh_ = kNone;
  for (size_t i = 0; i < count; ++i) {
    if (!is_written(op, i)) continue;
    const c10::IValue& argument = torch::jit::peek(stack, i, count);
    if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) copy_aside(entry_of(tensor));
    } else {
      copy_aside(entry_of(argument));
    }
  }
  return false;
}

// The memory goes to the function, which writes to it; what is kept is a copy.
void KeptProducts::copy_aside(size_t entry) {
  if (entry == kNone) return;
  const c10::impl::ExcludeDispatchKeyGuard inside(kKeyBelowAutograd);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (c10::IValue& result : entries_[entry].results) {
    if (!has_memory(result)) continue;
    memory_.erase(result.toTensor().storage().unsafeGetStorageImpl());
    result = result.toTensor().clone();
  }
  entries_[entry].versions.clear();
}

void KeptProducts::after_other(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  bool views_of_fresh = fresh_ != kNone;
  const auto note = [&](const c10::IValue& result) {
    const size_t entry = entry_of(result);
    views_of_fresh = views_of_fresh && entry == fresh_;
    // _unsafe_view and unsafe_split give tensors that autograd does not know to be views.
    if (entry != kNone && !second_call_) {
      entries_[entry].versions.push_back(
          {torch::autograd::impl::version_counter(result.toTensor())});
    }
  };
  for (const c10::IValue& result : torch::jit::last(stack, op.schema().returns().size())) {
    if (result.isTensorList()) {
      for (const at::Tensor& tensor : result.toTensorVector()) note(tensor);
    } else {
      note(result);
    }
  }
  if (!views_of_fresh) fresh_ = kNone;
}

}  // namespace lockstep::parallel::detail
