// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/tag.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

namespace lockstep::parallel::detail {
namespace {

void delete_tag(void* tag) { delete static_cast<Tag*>(tag); }

c10::DataPtr pointer(void* data, c10::Device device, Tag tag) {
  return {data, new Tag(std::move(tag)), &delete_tag, device};
}

}  // namespace

const std::string& FlatNames::at(int64_t byte) const {
  const auto after = std::upper_bound(bytes.begin(), bytes.end(), byte);
  return names[static_cast<size_t>(std::max<int64_t>(after - bytes.begin() - 1, 0))];
}

const std::string& Tag::name_of(const at::Tensor& view) const {
  return names->at(view.storage_offset() * static_cast<int64_t>(view.element_size()));
}

const Tag* find_tag(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.storage().data_ptr().cast_context<Tag>(&delete_tag);
}

c10::Storage make_storage(void* data, size_t bytes, c10::Device device, Tag tag) {
  return {c10::Storage::use_byte_size_t(), bytes, pointer(data, device, std::move(tag)),
          /*allocator=*/nullptr, /*resizable=*/false};
}

void repoint(const c10::Storage& storage, void* data, c10::Device device, Tag tag) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(pointer(data, device, std::move(tag)));
}

at::Tensor tagged_tensor(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes,
                         int64_t offset) {
  const auto backend = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet({backend, kShardKey}),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace lockstep::parallel::detail
