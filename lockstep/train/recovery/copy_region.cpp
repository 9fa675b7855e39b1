// SPDX-License-Identifier: Apache-2.0
// Head, identity, list of slices, two or three slots. A slot is a text and the data. The number
// that makes a copy valid is written last and taken back first.
#include "lockstep/train/recovery/copy_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <future>
#include <thread>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/launch/recovery_memory.h"

namespace lockstep::train {
namespace {

constexpr uint64_t kMagic = 0x3370'6f63'6b63'6f6c;
constexpr uint64_t kHeadBytes = 4096;
constexpr uint64_t kTextBytes = uint64_t{1} << 16;
// A chunk has a checksum of its own, so that several threads can take them.
constexpr uint64_t kChunk = uint64_t{1} << 20;
constexpr uint64_t kPiece = uint64_t{1} << 17;  // is still in the cache when its checksum is taken
static_assert(kChunk % kPiece == 0);
constexpr off_t kAreaBytes = launch::kRecoveryStride / CopyRegion::kAreas;

uint64_t slot_bytes(uint64_t data_bytes) { return kTextBytes + round_up(data_bytes, kHeadBytes); }

template <class T>
std::span<const std::byte> bytes_of_value(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

std::vector<uint32_t> checksums_of_chunks(std::span<const std::byte> data) {
  std::vector<uint32_t> checksums((data.size() + kChunk - 1) / kChunk);
  const auto take = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const auto rest = data.subspan(i * kChunk);
      checksums[i] = io::crc32c(rest.first(std::min(rest.size(), kChunk)));
    }
  };
  // Others of this rank and of its host compute at the same time.
  const size_t threads = std::clamp<size_t>(std::thread::hardware_concurrency() / 4, 1, 4);
  const size_t share = (checksums.size() + threads - 1) / threads;
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < threads && i * share < checksums.size(); ++i) {
    others.push_back(std::async(std::launch::async, take, i * share,
                                std::min((i + 1) * share, checksums.size())));
  }
  take(0, std::min(share, checksums.size()));
  for (auto& each : others) each.get();
  return checksums;
}

}  // namespace

struct CopyRegion::Slot {
  std::atomic<int64_t> valid;  // step + 1; 0: not a copy
  int64_t generation;
  uint64_t text_bytes;
  uint32_t checksum;
  std::atomic<bool> verified;

  CopyId id() const { return {generation, valid.load(std::memory_order_acquire) - 1}; }
};

struct CopyRegion::Head {
  std::atomic<uint64_t> magic;
  int64_t generation;
  uint64_t data_bytes, identity_bytes, slices_bytes, copies;
  Slot slots[3];
};

CopyRegion::CopyRegion(int memory, int local_rank, int area, int64_t generation)
    : memory_(memory),
      local_rank_(local_rank),
      start_(local_rank * launch::kRecoveryStride + area * kAreaBytes),
      generation_(generation) {
  map(kHeadBytes);
  const Head& head = this->head();
  if (head.magic.load(std::memory_order_acquire) == kMagic)
    map(bytes_for(head.data_bytes, head.identity_bytes + head.slices_bytes,
                  static_cast<int>(head.copies)));
}

CopyRegion::~CopyRegion() { munmap(mapped_, mapped_bytes_); }

void CopyRegion::map(uint64_t bytes) {
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_, start_);
  if (address == MAP_FAILED)
    throw SystemError(format("cannot map {} of the launcher's memory for copies",
                             size_text(static_cast<int64_t>(bytes))),
                      errno);
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  mapped_ = static_cast<std::byte*>(address);
  mapped_bytes_ = bytes;
}

uint64_t CopyRegion::bytes_for(uint64_t data_bytes, size_t text_bytes, int copies) {
  return kHeadBytes + round_up(text_bytes, kHeadBytes) +
         static_cast<uint64_t>(copies) * slot_bytes(data_bytes);
}

CopyRegion::Head& CopyRegion::head() const { return *reinterpret_cast<Head*>(mapped_); }

std::span<CopyRegion::Slot> CopyRegion::slots() const {
  return std::span(head().slots).first(head().copies);
}

CopyRegion::Slot* CopyRegion::newest_slot(bool verified) const {
  Slot* newest = nullptr;
  for (Slot& slot : slots()) {
    if (slot.valid.load() <= 0 || (verified && !slot.verified)) continue;
    if (newest == nullptr || newest->id() < slot.id()) newest = &slot;
  }
  return newest;
}

uint64_t CopyRegion::slot_begin(int slot) const {
  const Head& head = this->head();
  return kHeadBytes + round_up(head.identity_bytes + head.slices_bytes, kHeadBytes) +
         static_cast<uint64_t>(slot) * slot_bytes(head.data_bytes);
}

std::byte* CopyRegion::text_of(int slot) const { return mapped_ + slot_begin(slot); }

std::byte* CopyRegion::data_of(int slot) const { return text_of(slot) + kTextBytes; }

// Of a copy whose step may not be valid yet.
uint32_t CopyRegion::checksum(int slot, int64_t step, std::span<const uint32_t> chunks) const {
  const Slot& found = head().slots[slot];
  io::Crc32c checksum;
  checksum.update({mapped_ + kHeadBytes, head().identity_bytes + head().slices_bytes});
  checksum.update(std::as_bytes(chunks));
  checksum.update(bytes_of_value(CopyId{found.generation, step}));
  checksum.update({text_of(slot), std::min(found.text_bytes, kTextBytes)});
  return checksum.value();
}

CopyRegion::Found CopyRegion::find(const std::string& identity) {
  Head& head = this->head();
  if (head.magic.load(std::memory_order_acquire) != kMagic) return {};
  head.generation = generation_;
  const auto* const text = reinterpret_cast<const char*>(mapped_ + kHeadBytes);
  if (std::string_view(text, head.identity_bytes) != identity)
    return {.refused = "its copies are of another configuration, data or version"};
  Found found{.slices = std::string(text + head.identity_bytes, head.slices_bytes),
              .room = static_cast<int>(head.copies)};
  for (size_t i = 0; i < head.copies; ++i) {
    const Slot& each = head.slots[i];
    if (each.valid.load(std::memory_order_acquire) <= 0) continue;
    const auto slot = static_cast<int>(i);
    const auto chunks = checksums_of_chunks({data_of(slot), head.data_bytes});
    if (each.checksum == checksum(slot, each.id().step, chunks)) {
      found.copies.push_back(each.id());
    } else {
      found.refused = format("its copy of step {} does not have its checksum", each.id().step);
    }
  }
  return found;
}

void CopyRegion::clear() {
  head().magic.store(0, std::memory_order_release);
  for (Slot& slot : head().slots) slot.valid.store(0, std::memory_order_release);
  // Where the system cannot free it, it stays, and is written over.
  [[maybe_unused]] const int freed = fallocate(memory_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                               start_ + static_cast<off_t>(kHeadBytes),
                                               kAreaBytes - static_cast<off_t>(kHeadBytes));
}

void CopyRegion::keep(const CopyId& copy) {
  for (Slot& slot : slots()) {
    const bool stays = slot.id() == copy || (slot.verified && slot.id() < copy);
    if (!stays) slot.valid.store(0, std::memory_order_release);
  }
}

void CopyRegion::verify_newest() {
  if (Slot* const newest = newest_slot(false)) newest->verified = true;
}

void CopyRegion::keep_verified() {
  for (Slot& slot : slots()) {
    if (!slot.verified) slot.valid.store(0, std::memory_order_release);
  }
}

void CopyRegion::drop_all() {
  for (Slot& slot : slots()) slot.valid.store(0, std::memory_order_release);
}

void CopyRegion::free_all_but(const CopyId& copy) {
  for (int slot = 0; slot < static_cast<int>(head().copies); ++slot) {
    if (head().slots[slot].id() == copy) continue;
    head().slots[slot].valid.store(0, std::memory_order_release);
    [[maybe_unused]] const int freed =
        fallocate(memory_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  start_ + static_cast<off_t>(slot_begin(slot)),
                  static_cast<off_t>(slot_bytes(head().data_bytes)));
  }
}

void CopyRegion::take(uint64_t begin, uint64_t bytes) {
  const auto end = static_cast<off_t>(begin + bytes);
  const int error = end > kAreaBytes ? EFBIG
                                     : posix_fallocate(memory_, start_ + static_cast<off_t>(begin),
                                                       static_cast<off_t>(bytes));
  if (error == 0) return;
  throw SystemError(format("cannot take {} of memory for copies (run.recovery memory)",
                           size_text(static_cast<int64_t>(bytes))),
                    error);
}

void CopyRegion::claim(const std::string& identity, const std::string& slices, uint64_t data_bytes,
                       int copies, int now) {
  const std::string text = identity + slices;
  const auto slots = static_cast<uint64_t>(copies);
  const bool is_there = head().magic.load(std::memory_order_acquire) == kMagic &&
                        head().copies == slots && head().data_bytes == data_bytes &&
                        head().identity_bytes == identity.size() &&
                        head().slices_bytes == slices.size() &&
                        std::memcmp(mapped_ + kHeadBytes, text.data(), text.size()) == 0;
  if (!is_there) clear();
  const uint64_t all = bytes_for(data_bytes, text.size(), copies);
  take(0, is_there ? all : bytes_for(data_bytes, text.size(), now));
  map(all);
  Head& head = this->head();
  if (!is_there) {
    head.data_bytes = data_bytes;
    head.identity_bytes = identity.size();
    head.slices_bytes = slices.size();
    head.copies = slots;
    std::memcpy(mapped_ + kHeadBytes, text.data(), text.size());
  }
  head.generation = generation_;
  head.magic.store(kMagic, std::memory_order_release);
}

void CopyRegion::claim_rest() {
  take(slot_begin(1), (head().copies - 1) * slot_bytes(head().data_bytes));
}

void CopyRegion::begin() {
  Head& head = this->head();
  if (head.generation != generation_)
    throw Error(format("this rank has been replaced: its copies belong to restart {} of the job",
                       head.generation));
  // The oldest, but neither the newest nor the newest that was verified, which may be the same.
  const Slot* const newest = newest_slot(false);
  const Slot* const verified = head.copies > 2 ? newest_slot(true) : nullptr;
  const auto age = [](const Slot& slot) {
    return slot.valid.load() > 0 ? slot.id() : CopyId{-1, -1};
  };
  slot_ = -1;
  for (int i = 0; i < static_cast<int>(head.copies); ++i) {
    const Slot& slot = head.slots[i];
    if (&slot == newest || &slot == verified) continue;
    if (slot_ < 0 || age(slot) < age(head.slots[slot_])) slot_ = i;
  }
  head.slots[slot_].valid.store(0, std::memory_order_seq_cst);
  head.slots[slot_].verified = false;
  written_ = 0;
  has_room_ = false;
  checksums_.clear();
  chunk_ = {};
}

void CopyRegion::append(std::span<const std::byte> bytes) {
  check(bytes.size() <= head().data_bytes - written_, "a copy has the size of its region");
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kPiece - written_ % kPiece));
    std::byte* const to = data_of(slot_) + written_;
    std::memcpy(to, piece.data(), piece.size());
    chunk_.update(piece);
    written_ += piece.size();
    bytes = bytes.subspan(piece.size());
    if (written_ % kChunk == 0) checksums_.push_back(std::exchange(chunk_, {}).value());
  }
}

std::span<std::byte> CopyRegion::room(uint64_t bytes) {
  check(bytes <= head().data_bytes - written_, "a copy has the size of its region");
  has_room_ = true;
  const std::span found(data_of(slot_) + written_, bytes);
  written_ += bytes;
  return found;
}

std::span<std::byte> CopyRegion::pages() const {
  return {text_of(slot_), slot_bytes(head().data_bytes)};
}

void CopyRegion::align() {
  constexpr std::byte kZeros[kAlignment] = {};
  append({kZeros, round_up(written_, kAlignment) - written_});
}

void CopyRegion::commit(int64_t step, const std::string& state) {
  check(written_ == head().data_bytes, "a copy has the size of its region");
  check(state.size() <= kTextBytes, "the text of a copy is short");
  Slot& slot = head().slots[slot_];
  std::memcpy(text_of(slot_), state.data(), state.size());
  slot.text_bytes = state.size();
  slot.generation = generation_;
  if (has_room_) {
    checksums_ = checksums_of_chunks({data_of(slot_), written_});
  } else if (written_ % kChunk != 0) {
    checksums_.push_back(chunk_.value());
  }
  slot.checksum = checksum(slot_, step, checksums_);
  if (head().generation == generation_) slot.valid.store(step + 1, std::memory_order_release);
}

int CopyRegion::slot_of(const CopyId& copy) const {
  for (int slot = 0; slot < static_cast<int>(head().copies); ++slot) {
    if (head().slots[slot].id() == copy) return slot;
  }
  throw Error(format("local rank {} has no copy of step {}", local_rank_, copy.step));
}

std::span<const std::byte> CopyRegion::data(const CopyId& copy) const {
  return {data_of(slot_of(copy)), head().data_bytes};
}

std::string CopyRegion::state(const CopyId& copy) const {
  const int slot = slot_of(copy);
  return {reinterpret_cast<const char*>(text_of(slot)), head().slots[slot].text_bytes};
}

void require_room_for_copies(uint64_t needed, uint64_t held, uint64_t available) {
  if (needed <= held || needed - held <= available) return;
  throw ConfigError(
      format("run.recovery memory needs {} bytes ({}) on this host for the copies of its ranks, "
             "{} bytes ({}) are available; use more hosts, or run.recovery checkpoint",
             needed, size_text(static_cast<int64_t>(needed)), held + available,
             size_text(static_cast<int64_t>(held + available))));
}

}  // namespace lockstep::train
