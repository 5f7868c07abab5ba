"""Training in a browser tab: recorded programs as data, and the page that replays them (docs/web.md)."""
