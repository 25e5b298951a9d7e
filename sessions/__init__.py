"""Agent sessions: trajectory readers, rendering and assembly."""
