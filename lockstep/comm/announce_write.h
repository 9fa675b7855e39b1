// SPDX-License-Identifier: Apache-2.0
// Tells recomputation of a write that torch's operators do not see. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lockstep::comm::detail {

// Operations write to memory past torch's operators. Recomputation, which keeps results of
// operators under this key, must not keep one that changes without noticing: an operator that
// writes no element tells. By the thread that calls the operation.
inline void announce_write(const at::Tensor& tensor) {
  if (!c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Fake)) return;
  tensor.variable_data().as_strided({0}, {1}).zero_();
}

}  // namespace lockstep::comm::detail
