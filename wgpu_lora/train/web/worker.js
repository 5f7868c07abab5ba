// Keeps the site's files (SITE and FILES are written in front at export), so that it works without a network.

const SHELL = ["./", ...FILES.filter((name) => !name.endsWith(".bin"))];

self.addEventListener("install", (event) =>
  event.waitUntil(caches.open(SITE).then((cache) => cache.addAll(SHELL)).then(() => self.skipWaiting())));

self.addEventListener("activate", (event) => event.waitUntil((async () => {
  for (const name of await caches.keys()) if (name !== SITE) await caches.delete(name);
  await self.clients.claim();
})()));

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET" || new URL(event.request.url).origin !== location.origin) return;
  event.respondWith((async () => {
    const cache = await caches.open(SITE), kept = await cache.match(event.request, { ignoreSearch: true });
    if (kept) return kept;
    const response = await fetch(event.request);
    if (response.ok) event.waitUntil(cache.put(event.request, response.clone()).catch(() => {})); // the browser may have no room
    return response;
  })());
});
