--[[ note_silence: note whether a server's last health check was answered in time.
  Keys: servers, stats, meta
  Takes
    server: text
    silent: flag      it was not: until it is, the server gets jobs only if no other can run them
  Returns
    since_ms: int     since when it is silent; 0: it is not, or is not registered
  Called by routing/queue/slots.py: Slots.note_silence
  Clock Redis TIME    Cost O(1) ]]
-- @include lib/now_ms
-- @include lib/keys

local now, stats = now_ms(), stats_key("server", server)
if not silent then
  redis.call("HDEL", stats, "silent_since")
  redis.call("HDEL", META, "silent:" .. server)
elseif redis.call("HEXISTS", SERVERS, server) == 1 then
  redis.call("HSETNX", stats, "silent_since", integer_text(now))
  redis.call("HSET", META, "silent:" .. server, "")
end
return tonumber(redis.call("HGET", stats, "silent_since") or "0")
