// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "lockstep/comm/backend.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm {
namespace {

// FNV-1a: the same on every rank, whatever its standard library.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char letter : text)
    hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211ULL;
  return hash;
}

}  // namespace

detail::GroupImpl::GroupImpl(Membership membership, std::string backend)
    : membership_(std::move(membership)), backend_(std::move(backend)) {
  // Ranks that are threads share a process, which has one recorder.
  if (flight::started() && membership_.size() > 1 && !membership_.world->objects)
    recorded_as_ = flight::add_group(membership_.name, membership_.size());
}

uint64_t detail::GroupImpl::record(const fabric::Operation& operation) const {
  if (!recorded_as_) return 0;
  const bool message = fabric::is_message(operation.kind);
  // Who allows one operation more time than the others is not surprised by a long wait.
  const milliseconds patience =
      operation.timeout > membership_.world->timeout ? operation.timeout / 15 : milliseconds{0};
  return flight::begin(
      {.group = *recorded_as_,
       .operation = fabric::name_of(operation.kind),
       .tag = operation.tag,
       .dtype = operation.dtype,
       .count = operation.count,
       .peer = operation.root < 0 ? -1 : membership_.members[static_cast<size_t>(operation.root)],
       .patience_ms = static_cast<int>(std::max(milliseconds{2000}, patience).count()),
       .message = message,
       .on_device = operation.device >= 0});
}

Group::Group()
    : impl_(detail::make_group(
          {"self", 0, {0}, std::make_shared<detail::World>(detail::World{.hosts = {0}})}, "none")) {
}

int Group::rank() const { return impl_->membership().rank; }
int Group::size() const { return impl_->membership().size(); }
const std::string& Group::name() const { return impl_->membership().name; }
std::string_view Group::backend() const { return impl_->backend(); }
layout::CommStrategy Group::strategy() const { return impl_->membership().world->strategy; }
std::span<const int> Group::members() const { return impl_->membership().members; }
milliseconds Group::timeout() const { return impl_->membership().world->timeout; }
std::chrono::nanoseconds Group::blocked_time() const {
  return std::chrono::nanoseconds{*impl_->membership().world->blocked};
}

int Group::local_rank() const {
  const auto& [name, rank, members, world] = impl_->membership();
  const auto host = [&](int member) { return world->hosts[static_cast<size_t>(member)]; };
  return static_cast<int>(std::count_if(members.begin(), members.begin() + rank, [&](int member) {
    return host(member) == host(members[static_cast<size_t>(rank)]);
  }));
}

int Group::local_size() const {
  const auto& [name, rank, members, world] = impl_->membership();
  const auto host = [&](int member) { return world->hosts[static_cast<size_t>(member)]; };
  return static_cast<int>(std::count_if(members.begin(), members.end(), [&](int member) {
    return host(member) == host(members[static_cast<size_t>(rank)]);
  }));
}

Group Group::split(int colour, int key, bool check) const {
  return split_as(colour, key, check, format("{}", colour));
}

Group Group::split_named(int colour, int key, const std::string& label) const {
  if (label.empty() || label.find_first_of(". /") != std::string::npos) {
    throw ConfigError(
        format("[split] rank {}: label '{}' must have characters, and no dot, space or slash",
               rank(), label));
  }
  return split_as(colour, key, false, label);
}

Group Group::split_as(int colour, int key, bool check, const std::string& label) const {
  if (colour < 0)
    throw ConfigError(format("[split] rank {}: colour {} must be at least 0", rank(), colour));
  const detail::Membership& mine = impl_->membership();
  const std::string name = format("{}.{}/{}", mine.name, impl_->next_split(), label);
  if (size() == 1)
    return Group(detail::make_group({name, 0, mine.members, mine.world}, impl_->backend()));

  const auto n = static_cast<size_t>(size());
  // Mine, and after it those of all; the backend's, too, if it does not end well.
  const auto memory = std::make_shared<std::vector<std::array<int64_t, 3>>>(n + 1);
  const auto hash = static_cast<int64_t>(hash_of(label));
  memory->front() = {colour, key, hash};
  const auto choices = std::span(*memory).subspan(1);
  fabric::Operation gather{.kind = fabric::OpKind::all_gather,
                           .dtype = DType::int64,
                           .input = std::as_bytes(std::span(*memory).first(1)),
                           .output = std::as_writable_bytes(choices),
                           .recv_counts = std::vector<int64_t>(n, 3),
                           .tag = "split",
                           .timeout = mine.world->timeout,
                           .count = static_cast<int64_t>(3 * n)};
  gather.record = impl_->record(gather);
  Work(impl_->submit(gather, memory), nullptr, gather.record).wait();
  // Groups of one name would share keys of the store.
  for (int peer = 0; peer < size(); ++peer) {
    const auto& [other, its_key, its_hash] = choices[static_cast<size_t>(peer)];
    if ((other == colour) == (its_hash == hash)) continue;
    throw ConfigError(
        format("[split] rank {}: label '{}' of colour {}, but rank {} has {} label for colour {}; "
               "each colour must have one label of its own",
               rank(), label, colour, peer, other == colour ? "another" : "the same", other));
  }

  std::vector<int> chosen;  // ranks of this group that chose the same colour
  for (int peer = 0; peer < size(); ++peer) {
    if (choices[static_cast<size_t>(peer)][0] == colour) chosen.push_back(peer);
  }
  std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) {
    return choices[static_cast<size_t>(a)][1] < choices[static_cast<size_t>(b)][1];
  });
  auto world = mine.world;
  if (check && !world->check) {
    world = std::make_shared<detail::World>(*mine.world);
    world->check = true;
  }
  detail::Membership membership{name, 0, {}, world};
  for (const int peer : chosen) {
    if (peer == rank()) membership.rank = membership.size();
    membership.members.push_back(mine.members[static_cast<size_t>(peer)]);
  }
  return Group(detail::make_group(std::move(membership), impl_->backend()));
}

// The same ranks in a world that differs as `change` says.
static Group changed(detail::GroupImpl& impl, std::string_view name,
                     const std::function<void(detail::World&)>& change) {
  detail::Membership membership = impl.membership();
  membership.name = format("{}.{}/{}", membership.name, impl.next_split(), name);
  membership.world = std::make_shared<detail::World>(*membership.world);
  change(*membership.world);
  return Group(detail::make_group(std::move(membership), impl.backend()));
}

Group Group::with_strategy(layout::CommStrategy strategy) const {
  return changed(*impl_, layout::name_of(strategy),
                 [&](detail::World& world) { world.strategy = strategy; });
}

Group Group::with_timeout(milliseconds timeout) const {
  if (timeout.count() <= 0) {
    throw ConfigError(format("[with_timeout] {} ms, must be greater than 0", timeout.count()));
  }
  return changed(*impl_, format("{}ms", timeout.count()),
                 [&](detail::World& world) { world.timeout = timeout; });
}

at::Tensor symmetric_empty(std::span<const int64_t> sizes, DType dtype, const Group& group,
                           const c10::Device& device) {
  const at::IntArrayRef shape(sizes.data(), sizes.size());
  const auto options = at::TensorOptions().dtype(memory::to_scalar_type(dtype)).device(device);
  const int64_t count =
      std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  const auto bytes = static_cast<size_t>(count) * size_of(dtype);
  const int place = detail::impl_of(group).device_for(at::empty({0}, options));
  const auto memory = place >= 0        ? detail::impl_of(group).allocate_on(place, bytes)
                      : device.is_cpu() ? detail::impl_of(group).allocate(bytes)
                                        : nullptr;
  if (!memory) return at::empty(shape, options);
  at::Tensor tensor = at::from_blob(
      memory.get(), shape, [memory](void*) {}, options);
  // Growing it would silently move it to ordinary memory.
  tensor.storage().unsafeGetStorageImpl()->set_resizable(false);
  return tensor;
}

at::Tensor symmetric_empty(std::span<const int64_t> sizes, DType dtype, const Group& group) {
  return symmetric_empty(sizes, dtype, group, at::Device(at::kCPU));
}

bool is_symmetric(const at::Tensor& tensor, const Group& group) {
  return tensor.is_contiguous() &&
         detail::impl_of(group).reaches(tensor.data_ptr(), tensor.nbytes());
}

bool uses_device_memory(const Group& group, const c10::Device& device) {
  return detail::impl_of(group).device_for(at::empty({0}, device)) >= 0;
}

}  // namespace lockstep::comm
