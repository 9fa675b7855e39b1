// SPDX-License-Identifier: Apache-2.0
// The largest magnitude of a tensor, from the kernel that wrote the tensor to the cast that reads
// it next: then no kernel has to read the tensor for it. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

namespace lockstep::nn {

// On from the first cast of the process on: other programs do not pay.
inline std::atomic<bool>& notes_amax() {
  static std::atomic<bool> wanted = false;
  return wanted;
}

// What this thread's last kernel wrote. The tensor is not kept, and is known by its storage, which
// no other tensor can have while this is there.
struct AmaxNote {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* data;
  int64_t numel;
  int64_t version;
  at::Tensor amax;
};
inline std::optional<AmaxNote>& last_amax() {
  thread_local std::optional<AmaxNote> note;
  return note;
}

inline void note_amax(const at::Tensor& tensor, at::Tensor amax) {
  if (tensor.is_inference()) return;
  last_amax().emplace(AmaxNote{.storage = tensor.storage().getWeakStorageImpl(),
                               .data = tensor.data_ptr(),
                               .numel = tensor.numel(),
                               .version = tensor._version(),
                               .amax = std::move(amax)});
}

// Undefined where the note is of another tensor, or of what this one was before it was changed. It
// is given once: the caller may change it.
inline at::Tensor take_amax(const at::Tensor& tensor) {
  if (!last_amax() || tensor.is_inference()) return {};
  const AmaxNote note = std::move(*last_amax());
  last_amax().reset();
  const bool same = note.storage.lock().get() == tensor.storage().unsafeGetStorageImpl() &&
                    note.data == tensor.data_ptr() && note.numel == tensor.numel() &&
                    note.version == tensor._version();
  return same ? note.amax : at::Tensor();
}

}  // namespace lockstep::nn
