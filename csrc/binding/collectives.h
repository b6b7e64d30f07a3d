/* The flce_comm of a call. The stable ABI has no process groups, and the arguments of torch's
 * functional collectives have no stable type: flce/distributed/collectives.py implements operators
 * for them. Where the GPUs can read each other's memory, it also allocates symmetric memory, and
 * cuda/peers.cu copies. */
#ifndef FLCE_BINDING_COLLECTIVES_H
#define FLCE_BINDING_COLLECTIVES_H

#include "binding/device.h"
#include "comm.h"

namespace flce {

#define COMM_SCHEMA "(str group, int id, Tensor(a!) received, Tensor sent) -> ()"

/* The tensors of a call in which its collectives send and receive. */
struct CommMemory {
  Tensor input;
  OptionalTensor grad_input;
  Tensor workspace;
  OptionalTensor teacher_input;
};

/* The collectives of one call; table() is NULL without a group. */
class Collectives {
 public:
  Collectives(const Device& device, const flce_problem& problem,
              const std::optional<std::string>& group, CommMemory memory)
      : device_(device),
        memory_(std::move(memory)),
        ranks_(problem.shard.ranks),
        rank_(problem.shard.rank),
        group_(group.value_or("")),
        table_{this, send_buffer, all_gather, all_to_all, wait, abandon} {}
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  const flce_comm* table() const { return group_.empty() ? nullptr : &table_; }

 private:
  template <typename T>
  static StableIValue value(const T& item) {
    return torch::stable::detail::from(item);
  }

  static flce_status call_operator(const char* op, StableIValue* arguments) {
    if (torch_call_dispatcher(op, "", arguments, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS)
      return FLCE_OK;
    StableIValue text[1]; /* the dispatcher's error message does not include the operator's */
    if (torch_call_dispatcher("flce::comm_error", "", text, TORCH_ABI_VERSION) !=
        AOTI_TORCH_SUCCESS)
      return flce_fail(FLCE_COMM_FAILED, "%s", op);
    return flce_fail(FLCE_COMM_FAILED, "%s",
                     torch::stable::detail::to<std::string>(text[0]).c_str());
  }

  /* The status of `function`, or of what it throws: no exception may pass the engine's frames,
   * which have to abandon the collectives in flight. */
  template <typename Function>
  static flce_status caught(const Function& function) {
    try {
      return function();
    } catch (const std::exception& error) {
      return flce_fail(FLCE_COMM_FAILED, "%s", error.what());
    }
  }

  /* The status of a function of the CUDA library, with the library's own error message. */
  flce_status with_cuda_message(flce_status status) const {
    return status == FLCE_OK ? status : flce_fail(status, "%s", device_.table()->last_error());
  }

  /* `bytes` bytes at `data` as a view of `owner`, or nullopt if they are not part of it. */
  static OptionalTensor view_of(const Tensor& owner, const void* data, int64_t bytes) {
    const auto size = static_cast<int64_t>(owner.element_size());
    int64_t offset =
        static_cast<const char*>(data) - static_cast<const char*>(owner.const_data_ptr());
    if (offset < 0 || offset + bytes > owner.numel() * size || offset % size || bytes % size)
      return std::nullopt;
    int64_t elements = bytes / size, stride = 1;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(owner.get(), 1, &elements, &stride, offset / size, &handle));
    StableIValue stack[] = {value(Tensor(handle)), value(ScalarType::Byte)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::view", "dtype", stack, TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }

  /* Memory of the call as a tensor that keeps it. A collective may go on after the call: it does
   * where an exception of a signal's handler comes between its begin and its wait. Until it has
   * ended torch keeps its tensors, also if its Work is dropped: gloo in its queue and its thread
   * (AsyncWork), NCCL in the copy of the Work that its watchdog holds (TensorShelf). */
  Tensor byte_view(const void* data, int64_t bytes) const {
    if (bytes == 0) data = memory_.workspace.const_data_ptr();
    OptionalTensor view = view_of(memory_.workspace, data, bytes);
    if (!view) view = view_of(memory_.input, data, bytes);
    if (!view && memory_.grad_input) view = view_of(*memory_.grad_input, data, bytes);
    if (!view && memory_.teacher_input) view = view_of(*memory_.teacher_input, data, bytes);
    if (!view) throw std::logic_error("flce: a collective outside of the call's tensors");
    return *view;
  }

  /* Fills peers_[id] where there is symmetric memory of at least `bytes` bytes. */
  flce_status find_peers(flce_collective_id id, int64_t bytes) {
    flce_peers& peers = peers_[id];
    StableIValue arguments[] = {value(group_), value(static_cast<int64_t>(id)), value(bytes)};
    FLCE_TRY(call_operator("flce::comm_send_buffer", arguments));
    auto addresses = torch::stable::detail::to<std::vector<int64_t>>(arguments[0]);
    if (static_cast<int64_t>(addresses.size()) != 2 * ranks_ || ranks_ > FLCE_MOST_PEERS)
      return FLCE_OK;
    peers.ranks = static_cast<int>(ranks_);
    peers.rank = static_cast<int>(rank_);
    for (int64_t r = 0; r < ranks_; r++) {
      peers.data[r] = reinterpret_cast<void*>(addresses[2 * r]);
      peers.flags[r] = reinterpret_cast<void*>(addresses[2 * r + 1]);
    }
    return FLCE_OK;
  }

  static flce_status send_buffer(void* self, flce_collective_id id, int64_t bytes, void** memory) {
    auto* comm = static_cast<Collectives*>(self);
    *memory = nullptr;
    comm->peers_[id] = {};
    if (comm->device_.id().type == aoti_torch_device_type_cpu()) return FLCE_OK;
    FLCE_TRY(caught([&] { return comm->find_peers(id, bytes); }));
    if (comm->uses_copy_engines(id)) *memory = comm->peers_[id].data[comm->rank_];
    return FLCE_OK;
  }

  /* Whether copy engines serve the collective: what it sends is in the memory of send_buffer. */
  bool uses_copy_engines(flce_collective_id id) const { return peers_[id].ranks > 0; }

  /* Begins a collective, which sends `sent_bytes` bytes and reads every rank's from `offset` on. */
  flce_status begin(const char* op, flce_collective_id id, void* recv, const void* send,
                    int64_t sent_bytes, int64_t offset, int64_t bytes) const {
    if (uses_copy_engines(id))
      return with_cuda_message(
          cuda_library().peers_begin(device_.cuda(), &peers_[id], id, recv, offset, bytes));
    return caught([&] {
      StableIValue arguments[] = {value(group_), value(static_cast<int64_t>(id)),
                                  value(byte_view(recv, ranks_ * bytes)),
                                  value(byte_view(send, sent_bytes))};
      return call_operator(op, arguments);
    });
  }

  static flce_status all_gather(void* self, flce_collective_id id, void* recv, const void* send,
                                int64_t bytes) {
    const auto* comm = static_cast<const Collectives*>(self);
    return comm->begin("flce::comm_all_gather", id, recv, send, bytes, 0, bytes);
  }

  static flce_status all_to_all(void* self, flce_collective_id id, void* recv, const void* send,
                                int64_t bytes) {
    const auto* comm = static_cast<const Collectives*>(self);
    return comm->begin("flce::comm_all_to_all", id, recv, send, comm->ranks_ * bytes,
                       comm->rank_ * bytes, bytes);
  }

  static flce_status wait(void* self, flce_collective_id id) {
    const auto* comm = static_cast<const Collectives*>(self);
    if (comm->uses_copy_engines(id))
      return comm->with_cuda_message(cuda_library().peers_wait(comm->device_.cuda(), id));
    return caught([&] {
      StableIValue arguments[] = {value(comm->group_), value(static_cast<int64_t>(id))};
      return call_operator("flce::comm_wait", arguments);
    });
  }

  /* Copy engines hold no tensors, so the call's are kept for the rest of the process. A stream that
   * waited for the copies would wait for ranks that may never begin theirs. */
  static void abandon(void* self, unsigned in_flight) {
    const auto* comm = static_cast<const Collectives*>(self);
    bool has_works = false, has_copies = false;
    for (int k = 0; k < FLCE_COLLECTIVES; k++) {
      if (!(in_flight >> k & 1)) continue;
      bool copies = comm->uses_copy_engines(static_cast<flce_collective_id>(k));
      (copies ? has_copies : has_works) = true;
    }
    if (has_copies) new CommMemory(comm->memory_);
    if (has_works) torch_call_dispatcher("flce::comm_abandon", "", nullptr, TORCH_ABI_VERSION);
  }

  const Device& device_;
  const CommMemory memory_;
  int64_t ranks_, rank_;
  std::string group_;
  flce_peers peers_[FLCE_COLLECTIVES] = {};
  flce_comm table_;
};

}  // namespace flce

#endif
