/* The collectives of a divided vocabulary (flce_comm), by operators that flce/collectives.py
 * implements with torch.distributed: the stable ABI has no process groups, and the arguments of
 * torch's functional collectives have no stable type. Where the GPUs can read each other's memory,
 * that file provides it, and the copies are made by peers.h. */
#ifndef FLCE_OP_COMM_H
#define FLCE_OP_COMM_H

#include <map>
#include <mutex>

#include "binding/torch_device.h"
#include "comm.h"

namespace {

#define COMM_SCHEMA "(Tensor(a!) received, Tensor sent, str group, int slot) -> ()"

/* The memory of a slot that all ranks of a group have mapped; no rank: there is none. */
struct Placed {
  int64_t bytes;
  flce_peers peers;
};

/* The table of a call; NULL if the caller gives no group. */
class Collectives {
 public:
  Collectives(const Device& device, const flce_problem& problem,
              const std::optional<std::string>& group)
      : device_(device),
        ranks_(problem.ranks),
        rank_(problem.rank),
        group_(group.value_or("")),
        table_{this, place, gather, exchange, wait} {}
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  const flce_comm* table() const { return group_.empty() ? nullptr : &table_; }

 private:
  template <typename T>
  static StableIValue value(const T& item) {
    return torch::stable::detail::from(item);
  }

  static flce_status called(const char* op, StableIValue* arguments) {
    if (torch_call_dispatcher(op, "", arguments, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS)
      return FLCE_OK;
    return flce_fail(FLCE_DEVICE_ERROR, "%s failed; torch has printed why", op);
  }

  Tensor bytes_of(const void* data, int64_t bytes) const {
    int64_t stride = 1;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
        const_cast<void*>(data), 1, &bytes, &stride, 0,
        torch::stable::detail::to<int32_t>(value(ScalarType::Byte)), device_.id().type,
        device_.id().index, &handle));
    return Tensor(handle);
  }

  flce_status begin(const char* op, flce_slot slot, void* recv, const void* send,
                    int64_t sent_bytes, int64_t bytes) const {
    StableIValue arguments[] = {value(bytes_of(recv, ranks_ * bytes)),
                                value(bytes_of(send, sent_bytes)), value(group_),
                                value(static_cast<int64_t>(slot))};
    return called(op, arguments);
  }

  /* Asks for memory, once for each group, slot and size: all ranks ask for the same. */
  flce_status ask_memory(flce_slot slot, int64_t bytes, Placed* placed) const {
    StableIValue arguments[] = {value(group_), value(static_cast<int64_t>(slot)), value(bytes)};
    FLCE_TRY(called("flce::comm_place", arguments));
    auto addresses = torch::stable::detail::to<std::vector<int64_t>>(arguments[0]);
    *placed = {bytes, {}};
    if (static_cast<int64_t>(addresses.size()) != 2 * ranks_ || ranks_ > FLCE_MOST_PEERS)
      return FLCE_OK;
    placed->peers.ranks = static_cast<int>(ranks_);
    placed->peers.rank = static_cast<int>(rank_);
    for (int64_t r = 0; r < ranks_; r++) {
      placed->peers.data[r] = reinterpret_cast<void*>(addresses[2 * r]);
      placed->peers.flags[r] = reinterpret_cast<void*>(addresses[2 * r + 1]);
    }
    return FLCE_OK;
  }

  static flce_status place(void* self, flce_slot slot, int64_t bytes, void** memory) {
    auto* own = static_cast<Collectives*>(self);
    static std::mutex mutex;
    static std::map<std::pair<std::string, int>, Placed> known;
    *memory = nullptr;
    own->peers_[slot] = {};
    if (own->device_.id().type == aoti_torch_device_type_cpu()) return FLCE_OK;
    std::lock_guard<std::mutex> lock(mutex);
    Placed& placed = known[{own->group_ + "/" + std::to_string(own->ranks_), slot}];
    if (placed.bytes < bytes) FLCE_TRY(own->ask_memory(slot, bytes, &placed));
    own->peers_[slot] = placed.peers;
    if (placed.peers.ranks > 0) *memory = placed.peers.data[own->rank_];
    return FLCE_OK;
  }

  /* Whether copy engines serve the slot: what it sends is in the memory that was placed. */
  bool copies(flce_slot slot) const { return peers_[slot].ranks > 0; }

  static flce_status gather(void* self, flce_slot slot, void* recv, const void* send,
                            int64_t bytes) {
    const auto* own = static_cast<const Collectives*>(self);
    if (own->copies(slot))
      return cuda_library().peers_begin(own->device_.cuda(), &own->peers_[slot], slot, recv, 0,
                                        bytes);
    return own->begin("flce::comm_gather", slot, recv, send, bytes, bytes);
  }

  static flce_status exchange(void* self, flce_slot slot, void* recv, const void* send,
                              int64_t bytes) {
    const auto* own = static_cast<const Collectives*>(self);
    if (own->copies(slot))
      return cuda_library().peers_begin(own->device_.cuda(), &own->peers_[slot], slot, recv,
                                        own->rank_ * bytes, bytes);
    return own->begin("flce::comm_exchange", slot, recv, send, own->ranks_ * bytes, bytes);
  }

  static flce_status wait(void* self, flce_slot slot) {
    const auto* own = static_cast<const Collectives*>(self);
    if (own->copies(slot)) return cuda_library().peers_wait(own->device_.cuda(), slot);
    StableIValue arguments[] = {value(own->group_), value(static_cast<int64_t>(slot))};
    return called("flce::comm_wait", arguments);
  }

  const Device& device_;
  int64_t ranks_, rank_;
  std::string group_;
  flce_peers peers_[FLCE_SLOTS] = {};
  flce_comm table_;
};

static_assert(static_cast<int>(FLCE_SLOTS) <= static_cast<int>(FLCE_PEER_LANES),
              "each slot has a lane of its own");

}  // namespace

#endif
