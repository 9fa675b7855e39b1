// SPDX-License-Identifier: Apache-2.0
// Results that cost more to compute than to keep, from code of ours that is no operator of torch.
// Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace lockstep::nn {

// Recomputation by operator sees torch's operators by itself. A function that computes something of
// their kind in many small calls, into memory of its own, tells it so.
class ProductKeeper {
 public:
  // The result of `compute`, or the one that it had in the first call.
  virtual at::Tensor product(const std::function<at::Tensor()>& compute) = 0;

 protected:
  ~ProductKeeper() = default;
};

// The keeper of what this thread computes, or null. As autograd's own state it belongs to the
// thread, because a function that runs deep inside a module is handed nothing else.
inline ProductKeeper*& product_keeper() {
  thread_local ProductKeeper* keeper = nullptr;
  return keeper;
}

inline at::Tensor kept_product(const std::function<at::Tensor()>& compute) {
  ProductKeeper* const keeper = product_keeper();
  return keeper == nullptr ? compute() : keeper->product(compute);
}

}  // namespace lockstep::nn
