// Streams of a simulated GPU: one thread and one queue each; events; the first error of work that already ran.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "gpu_file.h"

namespace simulated {

// Return whether the driver has locked this process, as before a checkpoint.
inline bool locked(GpuFile *gpu)
{
    GpuOwner *owner = gpu_owner(gpu, getpid(), 0);
    return owner && gpu_word(&owner->state) != OWNER_RUNNING;
}

// A marker in a stream's queue, as cudaEvent_t: complete once the stream has come to the last place where it was put.
class Event {
  public:
    uint64_t put()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        return ++last_;
    }
    void reach(uint64_t place)
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (place > reached_) {
            reached_ = place;
            when_ = std::chrono::steady_clock::now();
        }
        changed_.notify_all();
    }
    bool complete()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        return reached_ >= last_;
    }
    void wait()
    {
        std::unique_lock<std::mutex> guard(mutex_);
        wait_for(guard, last_);
    }
    uint64_t last()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        return last_;
    }
    void wait_for_place(uint64_t place)
    {
        std::unique_lock<std::mutex> guard(mutex_);
        wait_for(guard, place);
    }
    std::chrono::steady_clock::time_point when()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        return when_;
    }

  private:
    void wait_for(std::unique_lock<std::mutex> &guard, uint64_t place)
    {
        changed_.wait(guard, [&] { return reached_ >= place; });
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t last_ = 0, reached_ = 0;
    std::chrono::steady_clock::time_point when_;
};

// One stream. Work that raises leaves its text in `error`, and later work is dropped, as after an error of CUDA.
class Queue {
  public:
    // `memory` is held while work runs.
    Queue(GpuFile *gpu, std::shared_mutex &memory, std::function<void(const std::string &)> failed)
        : gpu_(gpu), memory_(memory), failed_(std::move(failed)), thread_([this] { run(); })
    {
        thread_.detach();
    }

    void enqueue(std::function<void()> work)
    {
        std::lock_guard<std::mutex> guard(mutex_);
        work_.push_back(std::move(work));
        added_++;
        changed_.notify_all();
    }

    void drain()
    {
        std::unique_lock<std::mutex> guard(mutex_);
        const uint64_t upto = added_;
        changed_.wait(guard, [&] { return done_ >= upto; });
    }

    bool empty()
    {
        std::lock_guard<std::mutex> guard(mutex_);
        return done_ == added_;
    }

  private:
    void run()
    {
        for (;;) {
            std::function<void()> work;
            {
                std::unique_lock<std::mutex> guard(mutex_);
                changed_.wait(guard, [&] { return !work_.empty(); });
                work = std::move(work_.front());
                work_.pop_front();
            }
            {
                std::shared_lock<std::shared_mutex> held(memory_);
                while (gpu_word(&gpu_->hang) || locked(gpu_)) {
                    held.unlock();
                    gpu_sleep(1000000);
                    held.lock();
                }
                const auto began = std::chrono::steady_clock::now();
                try {
                    work();
                } catch (const std::exception &error) {
                    failed_(error.what());
                }
                const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - began;
                if (GpuOwner *owner = gpu_owner(gpu_, getpid(), 0))
                    __atomic_add_fetch(&owner->busy_ns, spent.count(), __ATOMIC_RELAXED);
            }
            work = nullptr; // what it holds goes before anyone may take the work for done
            std::lock_guard<std::mutex> guard(mutex_);
            done_++;
            changed_.notify_all();
        }
    }

    GpuFile *gpu_;
    std::shared_mutex &memory_;
    std::function<void(const std::string &)> failed_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    uint64_t added_ = 0, done_ = 0;
    std::thread thread_;
};

} // namespace simulated
