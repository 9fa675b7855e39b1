// SPDX-License-Identifier: Apache-2.0
// For programs that use c10d themselves: their process group as a group.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <type_traits>
#include <utility>

#include "lockstep/comm/group.h"

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace lockstep::comm {

namespace detail {
Group adopt(c10::intrusive_ptr<c10d::Backend> group, InitOptions options);
Group adopt(c10::intrusive_ptr<c10d::ProcessGroup> group, InitOptions options);
}  // namespace detail

// The ranks of a c10d group that takes CPU tensors (Gloo) as a group: a c10d::ProcessGroup or, from
// libtorch 2.0 on, a c10d::Backend, or anything derived from them. Collective. It cannot be
// duplicated: as long as the program uses it too, all ranks must use it in one order, and messages
// are left to the group. Splits are Gloo groups of their own. With a backend other than "auto" the
// same ranks communicate over that.
template <class T>
Group adopt(const c10::intrusive_ptr<T>& group, InitOptions options = {}) {
  using Base =
      std::conditional_t<std::is_base_of_v<c10d::Backend, T>, c10d::Backend, c10d::ProcessGroup>;
  return detail::adopt(c10::intrusive_ptr<Base>(group), std::move(options));
}

}  // namespace lockstep::comm
