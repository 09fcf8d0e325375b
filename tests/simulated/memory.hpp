// Memory of a simulated GPU: segments from the GPU's capacity, cached and divided for each stream as by torch's
// caching allocator. Freed blocks are filled in the order of their stream; released segments become unreadable, and
// no address comes twice: the use of stale memory shows as wrong content or a signal, never as luck.
#pragma once
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "gpu_file.h"
#include "streams.hpp"

// The library of addresses that stay, in a process into which it was preloaded: the allocator above takes its segments
// by cudaMalloc then, as torch's does, and the stand-in for the driver has their contents.
extern "C" {
struct cadenza_segment {
    uint64_t address, size, number;
    int32_t device, away;
};
__attribute__((weak)) int cudaMalloc(void **where, size_t size);
__attribute__((weak)) int cudaFree(void *where);
__attribute__((weak)) size_t cadenza_addresses_list(cadenza_segment *list, size_t most);
}

namespace simulated {

inline bool by_driver() { return cadenza_addresses_list != nullptr; }

// Return whether an address has no memory behind it now.
inline bool is_away(const void *address)
{
    if (!by_driver())
        return false;
    std::vector<cadenza_segment> list(cadenza_addresses_list(nullptr, 0) + 64);
    list.resize(std::min(list.size(), cadenza_addresses_list(list.data(), list.size())));
    return std::any_of(list.begin(), list.end(), [at = reinterpret_cast<uint64_t>(address)](const auto &one) {
        return one.away && one.address <= at && at < one.address + one.size;
    });
}

// Make a device the one of the calling thread's context.
inline void use_device(int index)
{
    static const auto use = [] {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        return reinterpret_cast<void (*)(int)>(driver ? dlsym(driver, "stub_use_device") : nullptr);
    }();
    if (use)
        use(index);
}

constexpr size_t ROUNDING = 512, SMALL = 1 << 20, SMALL_SEGMENT = 2 << 20, LARGE_SEGMENT = 20 << 20;
constexpr size_t ADDRESSES = size_t(1) << 40;
constexpr int FREED = 0xDD;

struct Block {
    char *address;
    size_t size;
    size_t segment;     // start of its segment
    int64_t stream;
    bool used = false;  // also while other streams may still read it
    bool small = false;
    std::vector<std::shared_ptr<Event>> readers; // marks of other streams after their last use
    std::set<int64_t> recorded;
};

struct Figures {
    int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;
};

class Memory {
  public:
    // `mark` puts an event into a stream; `fill` overwrites a range in a stream's order; `drain` waits for the device.
    Memory(GpuFile *gpu, std::function<void(int64_t, std::shared_ptr<Event>)> mark,
           std::function<void(int64_t, char *, size_t)> fill, std::function<void()> drain)
        : gpu_(gpu), mark_(std::move(mark)), fill_(std::move(fill)), drain_(std::move(drain))
    {
        void *range = mmap(nullptr, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        start_ = next_ = range == MAP_FAILED ? nullptr : static_cast<char *>(range);
    }

    // Return memory for a stream, nullptr when the GPU is full.
    char *allocate(size_t bytes, int64_t stream)
    {
        const size_t size = std::max(ROUNDING, (bytes + ROUNDING - 1) / ROUNDING * ROUNDING);
        if (gpu_fault(&gpu_->fail_allocation))
            return nullptr;
        collect();
        char *address = from_cache(size, stream);
        if (!address && (add_segment(size, stream) || (release(), add_segment(size, stream))))
            address = from_cache(size, stream);
        return address;
    }

    void free(char *address)
    {
        std::lock_guard<std::mutex> guard(mutex_);
        auto found = blocks_.find(address);
        if (found == blocks_.end())
            return;
        Block &block = found->second;
        figures_.allocated -= int64_t(block.size);
        for (int64_t stream : block.recorded) {
            auto event = std::make_shared<Event>();
            mark_(stream, event);
            block.readers.push_back(event);
        }
        block.recorded.clear();
        if (block.readers.empty())
            give_back(found);
        else
            waiting_.push_back(address);
    }

    // Keep a block from reuse until a stream has come to where it is now when the block is freed.
    void record(char *address, int64_t stream)
    {
        std::lock_guard<std::mutex> guard(mutex_);
        auto found = blocks_.find(address);
        if (found != blocks_.end() && found->second.stream != stream)
            found->second.recorded.insert(stream);
    }

    // Give all segments without a block in use back to the GPU; waits for the device first, as cudaFree.
    void release()
    {
        drain_();
        collect();
        drain_(); // the fills of the blocks that were collected
        std::lock_guard<std::mutex> guard(mutex_);
        for (auto block = blocks_.begin(); block != blocks_.end();) {
            const auto segment = segments_.find(block->second.segment);
            if (!block->second.used && block->second.size == segment->second) {
                let_go(block->first, segment->second);
                figures_.reserved -= int64_t(segment->second);
                segments_.erase(segment);
                block = blocks_.erase(block);
            } else {
                ++block;
            }
        }
    }

    // Copy all segments to host memory and let their pages go, as the driver's checkpoint of a process does.
    void leave()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        for (const auto &[start, total] : segments_) {
            auto *address = reinterpret_cast<char *>(start);
            away_[start].assign(address, address + total);
            mmap(address, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        }
    }

    void come_back()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        for (const auto &[start, content] : away_) {
            mprotect(reinterpret_cast<char *>(start), content.size(), PROT_READ | PROT_WRITE);
            std::memcpy(reinterpret_cast<char *>(start), content.data(), content.size());
        }
        away_.clear();
    }

    Figures figures()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        return figures_;
    }

    void reset_peaks()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        figures_.allocated_peak = figures_.allocated;
        figures_.reserved_peak = figures_.reserved;
    }

    bool holds(const void *address)
    {
        if (!by_driver())
            return address >= start_ && address < start_ + ADDRESSES;
        std::lock_guard<std::mutex> guard(mutex_);
        const auto after = segments_.upper_bound(reinterpret_cast<size_t>(address));
        return after != segments_.begin() &&
               reinterpret_cast<size_t>(address) < std::prev(after)->first + std::prev(after)->second;
    }

    int index = 0; // of its device

    // Return the segments as JSON, in the form of torch.cuda.memory_snapshot().
    std::string snapshot(int device)
    {
        std::lock_guard<std::mutex> guard(mutex_);
        std::ostringstream text;
        text << "[";
        const char *between = "";
        for (const auto &[start, total] : segments_) {
            std::ostringstream blocks;
            size_t allocated = 0;
            int64_t stream = 0;
            const char *comma = "";
            for (auto block = blocks_.find(reinterpret_cast<char *>(start));
                 block != blocks_.end() && block->second.segment == start; ++block) {
                stream = block->second.stream;
                allocated += block->second.used ? block->second.size : 0;
                blocks << comma << "{\"address\":" << reinterpret_cast<size_t>(block->first)
                       << ",\"size\":" << block->second.size << ",\"state\":\""
                       << (block->second.used ? "active_allocated" : "inactive") << "\"}";
                comma = ",";
            }
            text << between << "{\"device\":" << device << ",\"address\":" << start << ",\"total_size\":" << total
                 << ",\"allocated_size\":" << allocated << ",\"stream\":" << stream
                 << ",\"segment_pool_id\":[0,0],\"blocks\":[" << blocks.str() << "]}";
            between = ",";
        }
        text << "]";
        return text.str();
    }

  private:
    using Place = std::map<char *, Block>::iterator;

    char *from_cache(size_t size, int64_t stream)
    {
        std::lock_guard<std::mutex> guard(mutex_);
        Place best = blocks_.end();
        for (Place block = blocks_.begin(); block != blocks_.end(); ++block) {
            const Block &one = block->second;
            if (!one.used && one.stream == stream && one.size >= size && one.small == (size <= SMALL) &&
                (best == blocks_.end() || one.size < best->second.size))
                best = block;
        }
        if (best == blocks_.end())
            return nullptr;
        Block &block = best->second;
        const size_t rest = block.size - size;
        if (rest >= (block.small ? ROUNDING : SMALL)) {
            Block left = block;
            left.address += size;
            left.size = rest;
            block.size = size;
            blocks_.emplace(left.address, left);
        }
        block.used = true;
        figures_.allocated += int64_t(block.size);
        figures_.allocated_peak = std::max(figures_.allocated_peak, figures_.allocated);
        return block.address;
    }

    bool add_segment(size_t size, int64_t stream)
    {
        const size_t whole = size <= SMALL ? SMALL_SEGMENT
                             : size < LARGE_SEGMENT / 2 ? LARGE_SEGMENT
                                                        : (size + SMALL_SEGMENT - 1) / SMALL_SEGMENT * SMALL_SEGMENT;
        while (locked(gpu_))
            gpu_sleep(1000000);
        std::lock_guard<std::mutex> guard(mutex_);
        char *place = take(whole);
        if (!place)
            return false;
        Block block{place, whole, reinterpret_cast<size_t>(place), stream};
        block.small = size <= SMALL;
        segments_[block.segment] = whole;
        blocks_.emplace(place, block);
        figures_.reserved += int64_t(whole);
        figures_.reserved_peak = std::max(figures_.reserved_peak, figures_.reserved);
        return true;
    }

    char *take(size_t bytes)
    {
        if (by_driver()) {
            void *place = nullptr;
            use_device(index);
            return cudaMalloc(&place, bytes) ? nullptr : static_cast<char *>(place);
        }
        if (!start_ || next_ + bytes > start_ + ADDRESSES || gpu_take(gpu_, getpid(), int64_t(bytes)))
            return nullptr;
        if (mprotect(next_, bytes, PROT_READ | PROT_WRITE)) {
            gpu_take(gpu_, getpid(), -int64_t(bytes));
            return nullptr;
        }
        return std::exchange(next_, next_ + bytes);
    }

    void let_go(char *place, size_t bytes)
    {
        if (by_driver()) {
            cudaFree(place);
            return;
        }
        mmap(place, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        gpu_take(gpu_, getpid(), -int64_t(bytes));
    }

    // Take back the freed blocks that no other stream can still read.
    void collect()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        for (auto address = waiting_.begin(); address != waiting_.end();) {
            auto found = blocks_.find(*address);
            auto &readers = found->second.readers;
            if (std::all_of(readers.begin(), readers.end(), [](auto &one) { return one->complete(); })) {
                readers.clear();
                give_back(found);
                address = waiting_.erase(address);
            } else {
                ++address;
            }
        }
    }

    void give_back(Place block)
    {
        if (!is_away(block->first))
            fill_(block->second.stream, block->first, block->second.size);
        block->second.used = false;
        auto next = std::next(block);
        if (next != blocks_.end() && joins(block, next)) {
            block->second.size += next->second.size;
            blocks_.erase(next);
        }
        if (block != blocks_.begin() && joins(std::prev(block), block)) {
            std::prev(block)->second.size += block->second.size;
            blocks_.erase(block);
        }
    }

    static bool joins(Place first, Place second)
    {
        return !first->second.used && !second->second.used && first->second.segment == second->second.segment;
    }

    GpuFile *gpu_;
    std::function<void(int64_t, std::shared_ptr<Event>)> mark_;
    std::function<void(int64_t, char *, size_t)> fill_;
    std::function<void()> drain_;
    char *start_, *next_;
    std::mutex mutex_;
    std::map<char *, Block> blocks_;
    std::map<size_t, size_t> segments_;
    std::map<size_t, std::vector<char>> away_;
    std::vector<char *> waiting_;
    Figures figures_;
};

} // namespace simulated
