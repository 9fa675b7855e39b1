// SPDX-License-Identifier: Apache-2.0
// Copies of a rank's state, of different steps, in memory that outlives the rank. Private: not
// installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/io/crc32c.h"
#include "lockstep/train/recovery/copied_slices.h"

namespace lockstep::train {

// An area of the launcher's memory (launch/recovery_memory.h). Each local rank has kAreas of them:
// two for copies of its own, and two for those of the rank with its number on another node. Copies
// of a start with another layout are made in one while those before are still in the other. While a
// copy is written, the one before stays, and of three also the newest that was verified. A copy
// that is not complete, or is damaged, is not found.
class CopyRegion {
 public:
  static constexpr int kAreas = 4, kGuestArea = 2;  // the first for copies of another node
  static constexpr uint64_t kAlignment = 64;

  // `generation`: the number of starts of this job's ranks before this one.
  CopyRegion(int memory, int local_rank, int area, int64_t generation);
  ~CopyRegion();
  CopyRegion(const CopyRegion&) = delete;
  CopyRegion& operator=(const CopyRegion&) = delete;

  // Bytes of an area for so many copies, two or three. `text`: identity and list of slices.
  static uint64_t bytes_for(uint64_t data_bytes, size_t text_bytes, int copies);

  // What there is, of something with exactly this identity. A rank of an earlier start can write
  // nothing here from now on.
  struct Found {
    std::vector<CopyId> copies = {};  // that are sound
    std::string slices = {};          // that each of them holds: to_text()
    std::string refused = {};         // why others are not among them
    int room = 0;                     // for so many copies
  };
  Found find(const std::string& identity);
  // No copy is left, and the memory of earlier ones is freed.
  void clear();
  // Of the copies none is left but this one, and older ones that were verified.
  void keep(const CopyId& copy);
  // The newest copy is that of a state that was found to be right afterwards.
  void verify_newest();
  // Of the copies only those are left that were verified.
  void keep_verified();
  void drop_all();
  // None is left but this one. The memory of the others is freed too; the region is not written
  // again.
  void free_all_but(const CopyId& copy);

  // Takes the memory of so many copies, so that later writes cannot fail for want of it, and
  // ownership: copies of the same slices stay. Throws SystemError where there is not enough. `now`:
  // those whose memory is taken at once; that of the rest is taken by claim_rest().
  void claim(const std::string& identity, const std::string& slices, uint64_t data_bytes,
             int copies, int now);
  void claim_rest();

  // One copy after the other, in place of the oldest: begin(), any number of append(), commit().
  void begin();
  void append(std::span<const std::byte> bytes);
  // Instead of append(): the next bytes, which the caller fills before commit().
  std::span<std::byte> room(uint64_t bytes);
  void align();  // to the next multiple of kAlignment
  // The memory of the copy that is being written, in whole pages.
  std::span<std::byte> pages() const;
  void commit(int64_t step, const std::string& state);

  // What a sound copy holds.
  std::span<const std::byte> data(const CopyId& copy) const;
  std::string state(const CopyId& copy) const;

 private:
  struct Head;
  struct Slot;
  Head& head() const;
  std::span<Slot> slots() const;
  Slot* newest_slot(bool verified) const;  // null: there is none
  void map(uint64_t bytes);
  void take(uint64_t begin, uint64_t bytes);
  uint64_t slot_begin(int slot) const;
  int slot_of(const CopyId& copy) const;  // throws Error where there is none
  std::byte* text_of(int slot) const;
  std::byte* data_of(int slot) const;
  uint32_t checksum(int slot, int64_t step, std::span<const uint32_t> chunks) const;

  const int memory_, local_rank_;
  const off_t start_;
  const int64_t generation_;
  std::byte* mapped_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  // Of the copy that is being written.
  int slot_ = 0;
  uint64_t written_ = 0;
  bool has_room_ = false;            // given to the caller: not all bytes are known yet
  std::vector<uint32_t> checksums_;  // of the chunks that are complete
  io::Crc32c chunk_;                 // of the one that is not
};

// Throws ConfigError unless `needed` bytes for copies, of which `held` are taken already, fit into
// what is available on this host.
void require_room_for_copies(uint64_t needed, uint64_t held, uint64_t available);

}  // namespace lockstep::train
