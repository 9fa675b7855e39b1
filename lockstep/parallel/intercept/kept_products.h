// SPDX-License-Identifier: Apache-2.0
// Results of matrix products, convolutions and attention, kept from a function's first call for its
// second. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/nn/autograd/product.h"

namespace lockstep::parallel::detail {

// The products of one function. The second call gets them in the order of the first, so it must
// compute the same; any number of second calls.
class KeptProducts : private nn::ProductKeeper {
 public:
  // While it lives, this thread's operators go through `products`, if there are any. ConfigError
  // where LOCKSTEP_INTERCEPT leaves operators alone or another library has the dispatch key.
  class Scope {
   public:
    explicit Scope(KeptProducts* products);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    KeptProducts* before_;
    nn::ProductKeeper* keeper_before_;
    c10::impl::IncludeDispatchKeyGuard include_;
  };

  // Autograd has saved a tensor, so the second call runs at least to here.
  void need_all_so_far() { needed_ = entries_.size(); }
  // The first call is over. What is changed in place from now on is not noticed as it happens.
  void end_first_call();
  // The next call gets what was kept. Error where that was changed in place since.
  void begin_second_call();

  // An operator of this thread, below autograd.
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack);

 private:
  struct Version {
    c10::VariableVersion counter;
    int64_t saved = 0;
  };
  struct Entry {
    std::string name;
    std::vector<c10::IValue> results;  // tensors share memory with those of the first call
    // Writes that came right after, before anything could read: add_ of the bias. The results are
    // those after them, and the second call leaves them out.
    int absorbed = 0;
    std::vector<Version> versions;  // of the results and of what else has their memory
  };
  static constexpr size_t kNone = SIZE_MAX;

  at::Tensor product(const std::function<at::Tensor()>& compute) override;

  void keep(std::string name, std::vector<c10::IValue> results);
  // The results that the first call had here.
  std::vector<c10::IValue> take(const std::string& name);
  // Before an operator that writes. True: it is left out.
  bool before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  void copy_aside(size_t entry);
  void after_other(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  // The entry that has this tensor's memory, or none.
  size_t entry_of(const c10::IValue& value) const;
  void share_memory(size_t entry);

  bool second_call_ = false;
  std::vector<Entry> entries_;
  size_t needed_ = 0;
  size_t next_ = 0;       // of the second call
  size_t fresh_ = kNone;  // the last product, while nothing but views of it has come since
  int absorbed_ = 0;      // writes to the fresh one in this call
  std::unordered_map<const void*, size_t> memory_;  // storage to entry
};

}  // namespace lockstep::parallel::detail
